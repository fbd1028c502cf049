"""The benchmarks of prefix cache and capacity: they run on a CPU and count right."""

import json
from itertools import islice
from pathlib import Path

import capacity
import eviction
import prefix
import pytest
import shapes
import torch
import traces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layouts"), [("tiny", ("replay", "columns")), ("qwen-tiny", ("replay",))]
)
def test_a_full_hit_leaves_the_tokens_after_the_last_boundary(
    shape: str, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    out = tmp_path / "a.json"
    sizes = ["--isl", "70", "--alike", "50", "--small-block", "16", "--repeats", "1"]
    arguments = ["--shape", shape, *sizes, "--warmup", "0", "--device", "cpu", "--out", str(out)]
    assert prefix.main(arguments) == 0
    result = json.loads(out.read_text())
    kinds = {(r["state_layout"], r["block_size"], r["host_tier"]) for r in result["rows"]}
    assert kinds == {(k, b, h) for k in layouts for b in (32, 16) for h in (0, 1)}
    for row in result["rows"]:
        assert row["hit_tokens"] == 64
        assert row["run_tokens"] == 6
    assert {r["fetched_blocks"] for r in result["rows"] if r["host_tier"]} == {3, 5}
    for row in result["identical_prompts"]:
        blocks = 49 // row["block_size"]
        assert row["hit_blocks"] == [0, blocks, blocks]
        assert row["mean_acceptance_length"] > 1


@pytest.mark.slow
def test_a_chats_turns_run_what_is_new(tmp_path: Path) -> None:
    out, turns = tmp_path / "a.json", 4
    sizes = ["--system", "40", "--turns", str(turns), "--message", "9", "--answer", "9"]
    arguments = ["--trace", "chat", "--shape", "tiny", "--device", "cpu", "--side-by-side", "1,3"]
    assert prefix.main([*arguments, *sizes, "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(r["conversations"], r["prefix_caching"]) for r in rows] == [
        (many, caching) for many in (1, 3) for caching in (True, False)
    ]
    for row in rows:
        many = row["conversations"]
        assert row["turns"] == many * (turns - 1)
        assert row["turn_ends"] == many * turns * row["prefix_caching"]
        assert len(row["repeats"]["ttft_ms"]) == row["turns"]
        if row["prefix_caching"]:
            assert 9 <= min(row["repeats"]["run_tokens"]) <= max(row["repeats"]["run_tokens"]) <= 10
        else:
            assert min(row["repeats"]["run_tokens"]) > 40


def test_a_request_holds_one_state_instead_of_one_per_guess() -> None:
    """Nemotron-3-Super, K = 3, fp32: 40 layers of 128 x 64 x 128 and a window of 6 x 10240."""
    rows = {(r["shape"], r["ssm_dtype"]): r for r in capacity.memory_table()}
    row = rows["super-120b", "float32"]
    one = 40 * (128 * 64 * 128 * 4 + 6 * 10240 * 2)
    assert row["columns"]["state"] == 5 * one
    assert row["replay"]["live"] + row["replay"]["snapshot"] == 2 * one
    assert row["replay"]["kv_per_token"] == 2 * 2 * 128 * 2 * 9
    assert max(r["state_ratio"] for r in rows.values()) <= 0.45


@pytest.mark.parametrize("kind", ["columns", "replay"])
def test_the_pools_take_no_more_than_the_budget(kind: str) -> None:
    sizes = shapes.config(shapes.SHAPES["8b"])
    load = capacity.Load(state_layout=kind)
    room = capacity.Room(sizes, load, torch.bfloat16, 60 * 2**30)
    kv, states = room.blocks
    block, layers = load.config.kv_block(room.bytes["block_size"]), sizes.pattern.count("M")
    used = kv * block * room.bytes["kv_per_token"] + states * room.bytes["live"]
    if kind == "replay":
        used += room.requests * room.bytes["guesses"]
    assert layers == 24
    assert 59 * 2**30 < used <= 60 * 2**30
    assert room.requests == {"columns": 118, "replay": 265}[kind]


def test_as_many_requests_run_at_once_as_fit(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    sizes = ["--gib", "0.0006", "--isl", "30", "--osl", "8", "--served", "8", "--repeats", "1"]
    assert capacity.main(["--shape", "tiny", *sizes, "--device", "cpu", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    columns, replay = result["rows"]
    assert replay["requests"] > columns["requests"]
    for row in (columns, replay):
        assert row["most_running"] == row["requests"]
        assert row["served"]["output_tokens"] == 8 * 8


def test_rules_of_what_makes_room_are_compared_on_one_trace(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    few = ["--arrivals", "90", "--gib", "4", "--traces", "skewed", "--out", str(out)]
    assert eviction.main(few) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["split"] for row in rows] == ["engine", *(f"{s:.0%}" for s in eviction.SHARES)]
    for row in rows:
        assert 0 < min(row["hit"].values()) <= max(row["hit"].values()) < row["possible"]
        assert row["state_share"] <= 0.9
    assert rows[0]["hit"]["worth"] != rows[0]["hit"]["lru"]


def test_a_trace_is_the_same_each_time_and_says_what_was_said_before() -> None:
    mix = traces.Mix(2, 2, 1.0, {"chat": 1, "agent": 1, "document": 1, "few-shot": 1}, (1, 1, 1))
    first, again = ([*islice(traces.trace(mix, 3), 60)] for _ in range(2))
    said, hits = list[tuple[int, ...]](), dict[str, int]()
    for one, other in zip(first, again, strict=True):
        assert (one.prompt == other.prompt).all()
        assert (one.answer == other.answer).all()
        assert list(one.ends) == sorted(one.ends)
        assert 0 < one.ends[-1] < len(one.prompt)
        prompt = tuple(one.prompt.tolist())
        hits[one.kind] = hits.get(one.kind, 0) + any(prompt[: len(text)] == text for text in said)
        said.append(prompt + tuple(one.answer.tolist()))
    assert hits["chat"] > 0
    assert hits["agent"] > 0
    assert hits["document"] == hits["few-shot"] == 0
