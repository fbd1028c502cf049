"""The house stands as docs/how-it-works.md draws it: a room imports only from floors below."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "hybrid_runtime"
FLOORS = {
    "kernels": 1, "device": 2, "state": 3, "models": 3, "specdecode": 4, "engine": 5,
    "integrations": 6, "bench": 6, "server": 6, "cli": 7, "demo": 6, "__main__": 8,
}  # fmt: skip
MOST_LINES = 450


def sources() -> Iterator[tuple[str, Path]]:
    """Module name and file of everything that is installed."""
    for folder, name in (
        ("hybrid_runtime", PACKAGE),
        ("kernels", f"{PACKAGE}.kernels"),
        ("specdecode", f"{PACKAGE}.specdecode"),
    ):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join((name, *parts)).removesuffix(".__init__"), file


MODULES = dict(sources())


def imports(name: str) -> set[str]:
    """Modules of this package that a module imports, wherever in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name} imports relatively"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
    return {module for module in found if module.split(".")[0] == PACKAGE}


GRAPH = {name: imports(name) for name in MODULES}


def room(name: str) -> str:
    """`kernels.mamba2` or `state`: the folder that a module is in."""
    parts = name.split(".")[1:]
    return (
        ".".join(parts[:2]) if parts[:1] == ["kernels"] and len(parts) > 1 else ".".join(parts[:1])
    )


def floor(name: str) -> int:
    parts = name.split(".")
    return FLOORS[parts[1]] if len(parts) > 1 else 0


def test_rooms_look_down() -> None:
    wrong = [
        f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})"
        for name, others in GRAPH.items()
        for other in others
        if room(name).split(".")[0] != room(other).split(".")[0] and floor(other) >= floor(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_two_state_layouts_know_nothing_of_each_other() -> None:
    """Runners with columns need nothing of replay, and replay nothing of them."""
    align, replay = f"{PACKAGE}.state.align", f"{PACKAGE}.state.replay"
    for mine, theirs in ((align, replay), (replay, align)):
        own = [name for name in GRAPH if f"{name}.".startswith(f"{mine}.")]
        assert len(own) > 1
        found = {(name, other) for name in own for other in GRAPH[name] if other.startswith(theirs)}
        assert not found


@pytest.mark.parametrize("of", ["modules", "kernel rooms"])
def test_nothing_imports_in_a_circle(of: str) -> None:
    graph = GRAPH
    if of == "kernel rooms":
        graph = {}
        for name, others in GRAPH.items():
            if room(name).startswith("kernels."):
                graph.setdefault(room(name), set()).update({room(o) for o in others} - {room(name)})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {' <- '.join(error.args[1])}")


WORDS_OF_A_KIND = re.compile(
    r"\b(A_log|n_groups|x, B(,| and) dt|conv_channels|conv_width|ssm_shape|window_cache|"
    r"WindowCache|mamba2)\b"
)
KNOW_THE_KIND = {"kernels", "models"}
ADAPTERS_OF_THE_KIND = {
    "hybrid_runtime.integrations.vllm.gdn_layers",
    "hybrid_runtime.integrations.vllm.mamba2_layers",
}


def test_a_recurrence_is_known_to_its_kernels_and_models_only() -> None:
    """State manager and engine hold tensors and call functions: see `kernels/recurrence.py`."""
    found = [
        f"{name}: {word[0]}"
        for name, file in MODULES.items()
        if room(name).split(".")[0] not in KNOW_THE_KIND and name not in ADAPTERS_OF_THE_KIND
        for word in WORDS_OF_A_KIND.finditer(file.read_text())
    ]
    assert not found, "\n".join(found)
    shared = [name for name in MODULES if room(name) in ("kernels.conv", "kernels.replay")]
    assert shared
    for name in (*shared, f"{PACKAGE}.kernels.recurrence"):
        assert not re.search(r"\b(ssm|A_log)\b", MODULES[name].read_text(), re.IGNORECASE), name


def test_files_can_be_read_in_one_sitting() -> None:
    files = [*MODULES.values(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py")]
    lines = {str(f.relative_to(ROOT)): len(f.read_text().splitlines()) for f in files}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}
