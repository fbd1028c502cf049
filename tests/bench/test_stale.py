"""A table that is older than its code says so: decided by git, and only where git can know."""

import subprocess
from pathlib import Path

import pytest
import stale
import tables

CODE = '''"""Text."""\n\nRING = 15  # tokens\n'''


class Checkout:
    """A repository of its own, with one module in `code`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.first = self.commit(CODE)

    def git(self, *words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        words = ("git", "-C", str(self.root), *who, *words)
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    def write(self, text: str, name: str = "code/ring.py") -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def commit(self, text: str, name: str = "code/ring.py") -> str:
        self.write(text, name)
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", "any")
        return self.git("rev-parse", "--short", "HEAD")

    def note(self, *measured: str) -> str | None:
        for known in (stale._has_history, stale._known, stale._changed):
            known.cache_clear()
        return stale.note(self.root, measured, ("code", "other"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    (tmp_path / "tree").mkdir()
    return Checkout(tmp_path / "tree")


def test_comments_and_other_code_do_not_age_a_table(checkout: Checkout) -> None:
    checkout.commit('"""Better text."""\n\nRING = 15\n')
    checkout.commit("RING = 31\n", "elsewhere.py")
    assert checkout.note(checkout.first) == ""


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("name", ["code/ring.py", "code/new.py"])
def test_changed_code_is_named(checkout: Checkout, name: str, committed: bool) -> None:
    (checkout.commit if committed else checkout.write)("RING = 31\n", name)
    assert checkout.note(checkout.first) == "Measured before changes to `code`."
    newer = checkout.commit("RING = 31\n", name)
    assert checkout.note(newer) == ""
    assert checkout.note(newer, checkout.first) == "Measured before changes to `code`."
    checkout.write("", "other/any.py")
    assert checkout.note(checkout.first) == "Measured before changes to `code` and `other`."


def test_an_unknown_commit_is_named(checkout: Checkout) -> None:
    note = checkout.note("0123456")
    assert note == "Measured at a commit that this history does not have: 0123456."
    assert stale.NOTE.search(f"A caption. {note}")


def test_without_its_history_a_page_keeps_what_it_says(checkout: Checkout, tmp_path: Path) -> None:
    checkout.commit("RING = 31\n")
    note = checkout.note(checkout.first)
    shallow = tmp_path / "shallow"
    source = f"file://{checkout.root}"
    subprocess.run(["git", "clone", "-q", "--depth=1", source, str(shallow)], check=True)
    archive = tmp_path / "archive"
    archive.mkdir()
    for root in (shallow, archive):
        assert stale.note(root, [checkout.first], ["code"]) is None
    said = "<!-- any -->\n| 1 |\n\nA caption. {}\n<!-- /any -->"
    for old in (f"<!-- any -->\n| 0 |\n\nOlder. {note}\n<!-- /any -->", said.format(note)):
        table = tables.Table("| 1 |\n\nA caption.", None)
        assert tables.filled(old, {"any": table}) == said.format(note)
    fresh = tables.filled(said.format(note), {"any": table._replace(note="")})
    assert fresh == said.format("").replace(" \n", "\n")


def test_every_measured_table_says_which_code_it_is_about() -> None:
    measured = set()
    for name in tables.TABLES:
        tables.source.LOADED.clear()
        tables.TABLES[name]()
        measured |= {name} if any(map(stale.commits, tables.source.LOADED)) else set()
    # One is for results that are still to come.
    assert set(stale.CODE) == measured | {"vllm-qwen-steps"}
    paths = {path for paths in stale.CODE.values() for path in paths}
    assert [path for path in paths if not (tables.ROOT / path).exists()] == []
