"""Comparing the texts of two runs of vLLM."""

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vllm" / "comparison.py"


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("comparison", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.compared(one, other)
    assert f"{found['different_text']} of {found['requests']} texts differ" in module.line(found)
    return found


def run(tokens: list[list[int]], gaps: list[list[float]], cached: list[int]) -> dict[str, Any]:
    metrics = {"vllm:prefix_cache_hits": sum(cached)}
    about = {"ours": False, "blocks": 300, "reads": True}
    return {**about, "tokens": tokens, "gaps": gaps, "cached": cached, "metrics": metrics}


def test_a_difference_is_named_by_its_first_token_and_by_how_much_the_best_one_led() -> None:
    one = run([[5, 6, 7], [1, 2]], [[3.0, 0.5, 2.0], [1.0, 1.0]], [64, 0])
    other = run([[5, 9, 9], [1, 2]], [[3.0, 0.2, 4.0], [1.0, 1.0]], [0, 0])
    found = compared(one, other)
    assert found["first_differences"] == [(0, 1, 0.2)]
    assert found["largest_lead"] == 0.2
    assert found["different_prefix_hits"] == 1
    assert found["metrics"] == {"vllm:prefix_cache_hits": [64, 0]}


def test_a_text_that_only_stops_earlier_differs() -> None:
    one, other = run([[5, 6]], [[1.0, 0.3]], [0]), run([[5]], [[1.0]], [0])
    assert compared(one, other)["first_differences"] == [(0, 1, 0.3)]
    assert compared(one, one)["different_text"] == 0
