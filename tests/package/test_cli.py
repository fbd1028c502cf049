"""The command line: what it prints, and how it refuses."""

import ast
import io
import pydoc
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import hybrid_runtime
from hybrid_runtime import demo
from hybrid_runtime.cli import main, parser
from hybrid_runtime.engine import Engine, SamplingParams

MODEL = str(demo.SHIPPED)
MTP = "MTP, columns, "


def test_generate_streams_prompt_and_completion(capsys: pytest.CaptureFixture[str]) -> None:
    exact = ["--dtype", "float32", "--max-tokens", "20", "--stats"]
    assert main(["generate", MODEL, "-p", "def main(", *exact]) == 0
    printed = capsys.readouterr()
    engine = Engine.from_pretrained(MODEL, dtype="float32")
    want = engine.generate(["def main("], SamplingParams(max_tokens=20))[0]
    assert printed.out == f"def main({want.text}\n"
    assert "mean_acceptance_length" in printed.err


@pytest.mark.slow
def test_generate_is_the_same_for_every_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    texts = set()
    for drafter in ("none", "mtp", "eagle", "ngram"):
        arguments = ["generate", MODEL, "-p", "import ", "--max-tokens", "16"]
        arguments += ["--dtype", "float32"]
        assert main([*arguments, "--drafter", drafter]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


BAD = [
    (["generate", "/no/such/place", "-p", "x"], "'/no/such/place' does not exist"),
    (["generate", MODEL, "-p", ""], "prompt is empty"),
    (["generate", MODEL, "-p", "x", "--temperature", "-1"], "temperature is -1.0"),
    (["generate", MODEL, "-p", "x", "--top-p", "0"], "top_p is 0.0"),
    (["generate", MODEL, "-p", "x", "--max-tokens", "-1"], "max_tokens is -1"),
    (["generate", MODEL, "-p", "x", "--drafts", "0"], "num_speculative_tokens is 0"),
    (["generate", MODEL, "-p", "x", "--drafts", "-2"], "num_speculative_tokens is -2"),
    (["generate", MODEL, "-p", "x", "--block-size", "2"], "block_size is 2"),
    (["generate", MODEL, "-p", "xxxxx", "--max-model-len", "4"], "prompt has 5 tokens"),
    (
        ["generate", MODEL, "-p", "xxxxx", "--max-model-len", "64", "--max-tokens", "60"],
        "max_tokens is 60; with the 5 tokens of the prompt it must be at most 59, so that both fit "
        "max_model_len (64)",
    ),
    (["generate", MODEL, "-p", "x", "--device", "abacus"], "abacus"),
    (["generate", MODEL, "-p", "x", "--device", "cuda:99"], "device is 'cuda:99', but PyTorch"),
    (["generate", MODEL, "-p", "a\udcff"], "prompt has byte 0xff at 1; it must be UTF-8"),
    (["generate", MODEL, "-p", "x", "--threads", "0"], "threads is 0"),
    (["generate", MODEL, "-p", "x", "--drafter", "mtp", "--eagle", "y"], "eagle_path is 'y'"),
    (["demo", "--model", "/no/such/place"], "'/no/such/place' does not exist"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybrid-runtime: error: ")
    assert message in error
    assert error.count("\n") <= 2


def test_generate_gives_as_many_tokens_as_there_is_room_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--max-model-len", "24", "--max-tokens", "19"]
    assert main(["generate", MODEL, "-p", "def a", *sizes, "--stats", "--drafter", "none"]) == 0
    assert "emitted=19" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "serve"])
def test_every_option_has_help(command: str) -> None:
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    assert isinstance(commands.choices, dict)
    options = commands.choices[command]._actions
    assert len(options) > 2
    assert not [option.dest for option in options if not option.help]


def test_the_package_runs_as_a_module() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "hybrid_runtime", "--version"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, f"{version('hybrid-runtime')}\n"), ran.stderr


@pytest.mark.parametrize("arguments", [[], ["generate"], ["sing"], ["generate", MODEL]])
def test_bad_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: hybrid-runtime" in capsys.readouterr().err


def test_a_checkpoint_without_tokenizer_or_head_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "model"
    shutil.copytree(MODEL, copy)
    shutil.rmtree(copy / "eagle")
    assert main(["generate", str(copy), "-p", "x", "--drafter", "eagle"]) == 2
    assert "eagle" in capsys.readouterr().err
    (copy / "tokenizer.json").unlink()
    assert main(["generate", str(copy), "-p", "x"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_standard_input_that_is_no_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert main(["generate", MODEL, "-p", "-"]) == 2
    assert "standard input has byte 0xe9 at 3; it must be UTF-8" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("café".encode())))
    assert main(["generate", MODEL, "-p", "-", "--max-tokens", "1"]) == 0
    assert capsys.readouterr().out.startswith("café")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{version('hybrid-runtime')}\n"
    assert hybrid_runtime.__version__ == version("hybrid-runtime")
    assert "hybrid_runtime.engine" in pydoc.render_doc(hybrid_runtime)


def test_generate_runs_a_small_model_on_one_thread_unless_told_otherwise() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert main(["generate", MODEL, "-p", "x", "--max-tokens", "1"]) == 0
        assert torch.get_num_threads() == 1
        told = ["--threads", "2"]
        assert main(["generate", MODEL, "-p", "x", "--max-tokens", "1", *told]) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_demo_shows_code_and_what_layouts_cost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "TOKENS", 24)
    assert main(["demo", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("┃         return self._fp.readline(size)")
    assert lines[at - 1] == "      def readline(self, size=-1):"
    ast.parse("\n".join(line[2:] for line in lines[lines.index("  class File:") : at + 1]))
    cells = [line.rsplit(maxsplit=6) for line in lines if re.search(r"(\s+[\d.]+){6}\s*$", line)]
    table = {name.strip(): list(map(float, numbers)) for name, *numbers in cells}
    assert len(table) == len(demo.RUNS)
    plain, replay, columns = (table[name] for name in ("no drafts", "MTP, replay", f"{MTP}auto"))
    assert plain[0] > replay[0]  # steps
    assert plain[1] == 1 < replay[1] == columns[1]  # accepted
    assert 0 < plain[2] < replay[2] < 1 < columns[2] == 4  # written
    assert replay[3] == 0 < columns[3] < table[f"{MTP}always"][3]  # launches
    assert replay[4] == columns[4] == 0 < table[f"{MTP}blocking"][4]  # waits
    assert plain[5] < replay[5] < columns[5]  # KiB
