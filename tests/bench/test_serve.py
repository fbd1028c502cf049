"""The serving benchmark: its request lists and figures, and that two engines take turns. Nothing is
timed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qwen
import serve
import serve_ours
import serve_rows
import serving
import workload


def test_a_curve_gives_how_often_each_draft_is_accepted() -> None:
    assert workload.acceptance("qwen3.5", 3) == pytest.approx((0.93, 0.80, 0.66))
    assert workload.acceptance("3", 3) == (1.0, 1.0, 0.0)
    assert workload.acceptance("2.5", 2) == (1.0, 0.5)
    assert workload.acceptance("real", 3) is None
    # What is published for 7 says more of the last draft than of the one before.
    assert workload.acceptance("kimi-k3", 7) == pytest.approx(
        (0.84, 0.61, 0.42, 0.35, 0.22, 0.17, 0.17)
    )


@pytest.mark.parametrize(("name", "drafts"), [("qwen", 3), ("5", 3), ("0.5", 3), ("kimi-k3", 9)])
def test_acceptance_that_cannot_be_is_refused(name: str, drafts: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        workload.acceptance(name, drafts)


def test_both_engines_read_the_requests_that_were_made(tmp_path: Path) -> None:
    asks = workload.make("tiny", 9, 256, seed=3, rate=4.0, prefixes=2, prefix_tokens=5)
    assert len({tuple(ask.prompt[:5]) for ask in asks}) == 2
    times = [ask.at for ask in asks]
    assert times == sorted(times)
    assert all(8 <= len(ask.prompt) - 5 <= 40 and 4 <= ask.output <= 12 for ask in asks)
    workload.write(tmp_path / "list.json", asks)
    assert workload.read(tmp_path / "list.json") == asks


class Clockwork:
    """Three tokens a step for everybody, up to what was asked."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.most = 0

    def submit(self, number: int, ask: Any) -> None:
        self.left[number] = ask.output

    def step(self) -> Iterator[tuple[int, int, bool]]:
        self.most = max(self.most, len(self.left))
        for number, left in list(self.left.items()):
            new = min(3, left)
            self.left[number] -= new
            if not self.left[number]:
                del self.left[number]
            yield number, new, number not in self.left

    def reset(self) -> None: ...

    def use(self, setting: Any) -> None: ...

    @property
    def spare_time(self) -> float:
        return 1e-9


@pytest.mark.parametrize("places", [2, None])
def test_every_request_is_served_and_no_more_at_once_than_there_are_places(
    places: int | None,
) -> None:
    rate = None if places else 1e5
    asks = workload.make("tiny", 7, 256, seed=1, rate=rate)
    engine = Clockwork()
    timed, wall = serving.drive(engine, asks, places)
    assert [sum(n for _, n in one.arrivals) for one in timed] == [ask.output for ask in asks]
    assert engine.most == 2 if places else engine.most > 2
    assert wall >= max(one.arrivals[-1][0] for one in timed)


def test_figures_of_one_request() -> None:
    one = serving.Timed(sent=1.0)
    one.arrivals = [(1.5, 1), (1.6, 2), (1.9, 3)]
    found = serving.figures([one], 2.0, {"ttft": 499.0, "itl": 100.0})
    assert found["ttft_ms"]["mean"] == pytest.approx(500)
    assert found["itl_ms"]["mean"] == pytest.approx((2 * 50 + 3 * 100) / 5)
    assert found["output_tok_s"] == pytest.approx(3.0)
    assert found["goodput_s"] == 0
    assert found["tokens_per_arrival"] == 2.5
    assert serving.figures([one], 2.0, {"ttft": 501.0, "itl": 81.0})["goodput_s"] == 0.5
    assert serving.figures([one], 2.0, {"ttft": 501.0, "itl": 79.0})["goodput_s"] == 0


def test_the_opening_burst_is_no_part_of_times_to_first_tokens() -> None:
    timed = []
    for number, wait in enumerate((9.0, 9.0, 0.1)):
        timed.append(serving.Timed(sent=float(number)))
        timed[-1].arrivals = [(number + wait, 1), (number + wait + 1, 1)]
    found = serving.figures(timed, 20.0, {"ttft": 500.0, "itl": 2000.0}, opening=2)
    assert found["ttft_ms"]["mean"] == pytest.approx(100)
    assert found["opening_ttft_ms"]["p50"] == pytest.approx(9000)
    assert found["requests_s"] == pytest.approx(3 / 20)
    assert found["good_share"] == pytest.approx(1 / 3)


def test_a_shape_of_qwen_is_served(tmp_path: Path) -> None:
    chosen = ["--shape=qwen-tiny", "--lengths=tiny", "--places=2", "--layers=2"]
    chosen.append('--options={"block_size": 16, "max_tokens_per_step": 32}')
    settings = serve._settings(serve._parse(chosen))
    assert settings["model"] == qwen.config("qwen-tiny", 2)
    engine = serve_ours.Ours(json.loads(json.dumps(settings)))
    asks = workload.make("tiny", 3, settings["model"]["vocab_size"], seed=1)
    timed, _ = serving.drive(engine, asks, 2)
    assert [sum(n for _, n in one.arrivals) for one in timed] == [ask.output for ask in asks]


@pytest.mark.slow
def test_two_engines_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        "--shape=tiny", "--lengths=tiny", "--places=2", "--per-place=2", "--repeats=2",
        "--rates=80%", "--prefixes=1", "--prefix-tokens=16",
        '--turns={"vllm": [32, {"budget": 16, "queue": "early"}]}',
        '--options={"block_size": 16, "max_tokens_per_step": 32}',
    ]  # fmt: skip
    args = serve._parse(options)
    kept: list[str] = []
    commands = {"ours": serve.OURS, "vllm": serve.OURS}
    result = serve.measure(args, commands, lambda found: kept.append(json.dumps(found)))
    counts = [[len(row["repeats"]) for row in json.loads(found)["rows"]] for found in kept]
    assert counts == [[1, 1, 1], [2, 2, 2], [2, 2, 2, 1, 1], [2, 2, 2, 2, 2]]
    assert json.loads(kept[-1]) == json.loads(json.dumps(result))
    rows = result["rows"]
    early = {"budget": 16, "queue": "early"}
    assert [(row["engine"], row["setting"], row["places"]) for row in rows] == [
        ("ours", {}, 2), ("vllm", {"budget": 32}, 2), ("vllm", early, 2),
        ("ours", {}, None), ("vllm", {"budget": 32}, None),
    ]  # fmt: skip
    for ours, theirs in (rows[:2], rows[3:]):
        assert ours["repeats"][0]["output_tokens"] == theirs["repeats"][0]["output_tokens"] > 0
        assert theirs["ours_to_this"]["output_tok_s"] > 0
    assert rows[3]["rate"] == pytest.approx(0.8 * rows[0]["requests_s"])
    assert serve_rows.lines(result)

    monkeypatch.syspath_prepend(str(Path(serve.__file__).parents[1] / "tables"))
    import serve_tables

    result["engines"]["vllm"]["vllm"] = "9.9"
    serve.save(
        "serve-8b", {"options": vars(args), "name": "tiny"} | result, tmp_path / "serve-8b.json"
    )
    made = json.loads((tmp_path / "serve-8b.json").read_text())
    monkeypatch.setattr(serve_tables, "load", lambda device, name: made)
    made["rows"][0]["setting"] = {"budget": 64, "steps_ahead": 0}
    made["rows"][3]["setting"] = {"budget": 64}
    best = max(row["output_tok_s"] for row in rows[1:3])
    found = serve_tables.TABLES["serving"]()
    assert found.count(f"| 2 | {rows[0]['output_tok_s']:.0f} : {best:.0f} |") == 2
    assert "medians of 2 repeats, vLLM 9.9" in found
    found = serve_tables.TABLES["serving-queueing"]()
    assert "| 2 | ours | 64 | after the results |" in found
    assert "| 2 | vLLM | 16 |" in found
    found = serve_tables.TABLES["serving-arrivals"]()
    assert "| ours | 64 | late |" in found
    assert "| vLLM | 32 |" in found


@pytest.mark.parametrize(
    "options",
    [
        ["--acceptance", "most"],
        ["--temperature", "1"],
        ["--repeats", "0"],
        ["--shape", "qwen-tiny", "--quantization", "modelopt"],
        ["--vllm", "python", "--before", "python"],
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(options) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
