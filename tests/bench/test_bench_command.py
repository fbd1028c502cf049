"""`hybrid-runtime bench`: what it shows, and that nothing that was measured is lost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_runtime import demo
from hybrid_runtime.bench.measure import measure
from hybrid_runtime.bench.shapes import SHAPES, config
from hybrid_runtime.cli import main
from hybrid_runtime.models.registry import FAMILIES

MODEL = str(demo.SHIPPED)
MEASURE = "hybrid_runtime.bench.measure.measure"
SMALL = ["--isl", "12", "--osl", "8", "--repeats", "1"]


def test_a_checkpoint_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["bench", MODEL, "--batches", "1,2", *SMALL, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "python-small" in printed.out
    assert "drafts by mtp" in printed.out
    result = json.loads(out.read_text())
    assert result["drafter"] == "mtp"
    assert [row["batch"] for row in result["rows"]] == [1, 2]
    assert all(len(row["repeats"]) == 1 for row in result["rows"])
    assert list(tmp_path.iterdir()) == [out]
    for batch in (1, 2):
        (said,) = [x for x in printed.err.splitlines() if f"batch={batch}" in x and "repeat 1" in x]
        assert "left" in said


def test_a_shape_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, shape = tmp_path / "out.json", ["--shape", "qwen-tiny", "--layers", "2", "--max-model-len"]
    given = [*shape, "64", "--quantization", "fp8", "--block-size", "16", "--batches", "1"]
    assert main(["bench", *given, *SMALL, "--json", str(out)]) == 0
    assert "drafts by mtp" in capsys.readouterr().out
    assert json.loads(out.read_text())["model"] == "qwen-tiny"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "DIR is None and shape None; exactly one must be given"),
        ([MODEL, "--shape", "qwen3.5-9b"], "and shape 'qwen3.5-9b'; exactly one must be given"),
        (["--shape", "qwen3.5-9b", "--perplexity", MODEL], "random weights predict nothing"),
        (["--shape", "qwen-tiny", "--layouts", "columns"], "state_layout is 'columns'; it must be"),
        (["--shape", "qwen-tiny", "--layers", "0"], "num_hidden_layers is 0, must be an integer"),
    ],
)
def test_what_to_measure_must_be_clear(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *given, *SMALL]) == 2
    assert message in capsys.readouterr().err


def test_published_shapes_have_published_sizes() -> None:
    """Weights of a 9B and a 35B, and what the study says of their states."""
    for name, billions, state_mib in (("qwen3.5-9b", 9, 48), ("qwen3.5-35b-a3b", 35, 60)):
        sizes = config(name)
        model: Any = FAMILIES[SHAPES[name]["model_type"]].build(sizes, "meta", torch.bfloat16)
        count = sum(tensor.numel() for tensor in model.parameters()) / 1e9
        assert billions - 1 < count < billions + 1
        (group,) = model.groups
        matrix = group.recurrence(torch.bfloat16, torch.float32, "SD").checkpoint.matrix
        assert len(group.layers) * matrix.nbytes == state_mib * 2**20
        assert sizes.rotary.size == 64


@pytest.mark.slow
def test_tables_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ["--batches", "1", "--drafts", "0,3", "--strategies", "auto,always", "--lengths", "all"]
    assert main(["bench", MODEL, *lists, *SMALL]) == 0
    title, *table = capsys.readouterr().out.splitlines()
    assert "isl 12" in title
    assert max(map(len, table)) <= 100
    assert sum("always" in line for line in table) == 2 * 2


def interrupt(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let the second load fail."""
    calls = []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        return measure(*arguments)

    monkeypatch.setattr(MEASURE, failing)


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    interrupt(monkeypatch, KeyboardInterrupt())
    assert main(["bench", MODEL, "--batches", "1,2,3", *SMALL, "--json", str(out)]) == 130
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1]
    assert "step ms" in capsys.readouterr().out


def test_a_file_that_can_no_longer_be_written_does_not_cost_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder" / "out.json"
    out.parent.mkdir()

    def and_remove(*arguments: Any) -> Any:
        shutil.rmtree(out.parent)
        return measure(*arguments)

    monkeypatch.setattr(MEASURE, and_remove)
    assert main(["bench", MODEL, "--batches", "1", *SMALL, "--json", str(out)]) == 2
    printed = capsys.readouterr()
    assert "step ms" in printed.out
    assert "hybrid-runtime: error: " in printed.err


def test_a_checkpoint_without_a_draft_head_is_measured_with_n_grams(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("eagle"))
    file = copy / "config.json"
    config = json.loads(file.read_text())
    del config["num_nextn_predict_layers"], config["mtp_hybrid_override_pattern"]
    file.write_text(json.dumps(config))
    weights = copy / "model.safetensors"
    kept = {n: t for n, t in load_file(weights).items() if not n.startswith("mtp.")}
    save_file(kept, weights)
    assert main(["bench", str(copy), "--batches", "1", *SMALL]) == 0
    assert "drafts by ngram" in capsys.readouterr().out


def test_a_small_model_runs_on_one_thread() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert main(["bench", MODEL, "--batches", "1", *SMALL]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--batches", "0"], "batch is 0"),
        (["--acceptance", "0.5"], "acceptance is 0.5; with at most 3 drafts"),
        (
            ["--acceptance", "9"],
            "acceptance is 9; .* must be in 1..4",
        ),
        (["--acceptance", "nan"], "acceptance is nan"),
        (["--json", "/no/such/place"], "json is '/no/such/place': No such file or directory"),
        (["--threads", "0"], "threads is 0"),
        (["--device", "cuda:99"], "device is 'cuda:99', but PyTorch finds"),
    ],
)
def test_bad_input_is_one_line(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = [] if "--batches" in wrong else ["--batches", "1"]
    assert main(["bench", MODEL, "--isl", "8", "--osl", "4", *defaults, *wrong]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("hybrid-runtime: error: ")
    assert re.search(message, printed)
    assert printed.count("\n") == 1


def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "/no/such/model", "--json", "/no/such/place"]) == 2
    assert "json is" in capsys.readouterr().err


LISTS = {
    "--batches a": "--batches: is 'a'; it must be integers, separated by commas",
    "--drafts 3,": "--drafts: is '3,'; it must be integers, separated by commas",
    "--isl 1.5": "--isl: is '1.5'; it must be integers",
    "--osl 8;9": "--osl: is '8;9'; it must be integers",
    "--lengths long": "--lengths: is 'long'; it must be of equal, staggered",
    "--strategies hope": "--strategies: is 'hope'; it must be of blocking, ",
    "--layouts rows": "--layouts: is 'rows'; it must be of ",
    "--ssm-dtype int4": "--ssm-dtype: is 'int4'; it must be of float32, ",
    "--acceptance all": "--acceptance: is 'all'; it must be a number, or real",
}


@pytest.mark.parametrize("given", LISTS)
def test_a_list_that_is_none_is_bad_usage(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", MODEL, *given.split()])
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"hybrid-runtime bench: error: argument {LISTS[given]}")
