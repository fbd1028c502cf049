"""What `/metrics` counts is what the server did."""

from time import perf_counter

from helpers.http_server import completed, running, shipped

NAME = "hybrid_runtime"
BODY = {"prompt": "import ", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_after_known_requests() -> None:
    with running(shipped()) as server:
        started = perf_counter()
        texts = [
            completed(server.post("completions", json=BODY | {"stream": s})) for s in (False, True)
        ]
        assert texts[0] == texts[1]
        assert completed(server.post("completions", json=BODY | {"max_tokens": 1}))
        assert server.post("completions", json={"prompt": ""}).status_code == 400
        assert len(server.post("embeddings", json={"input": "x = 1"}).json()["data"]) == 1
        server.until(f"{NAME}_http_requests_open", 1)  # the one that asks
        found, page = server.metrics(), server.http.get("/metrics").text
    want: dict[str, float] = {
        'http_requests_total{path="/v1/completions",status="200"}': 3,
        'http_requests_total{path="/v1/completions",status="400"}': 1,
        'http_requests_total{path="/v1/embeddings",status="200"}': 1,
        'completions_total{finish_reason="length"}': 3,
        'completions_total{finish_reason="embedded"}': 1,
        "prompt_tokens_total": 3 * len("import ") + len("x = 1"),
        "generation_tokens_total": 2 * 6 + 1,
        "time_to_first_token_seconds_count": 3,
        "inter_token_latency_seconds_count": 2 * (6 - 1),
        "prefix_queried_tokens_total": 3 * len("import ") + len("x = 1"),
        "requests_waiting": 0,
        "requests_running": 0,
        'blocks_used{pool="kv"}': 0,
        'blocks_used{pool="state"}': 0,
        'blocks{pool="kv"}': server.engine.scheduler.kv.pool.size,
        'blocks{pool="state"}': server.engine.scheduler.state.pool.size,
        'prefix_short_hits_total{reason="short_prompt"}': 4,
    }
    assert {name: found.get(f"{NAME}_{name}") for name in want} == want
    assert 'steps_total{model_name="python-small"}' in page
    samples = [line for line in page.splitlines() if not line.startswith("#")]
    assert [line for line in samples if 'model_name="python-small"' not in line] == []
    rows, tokens = (found[f"{NAME}_drafted_row{kind}_total"] for kind in ("s", "_tokens"))
    assert found[f"{NAME}_acceptance_length"] == tokens / rows > 1
    assert 0 < found[f"{NAME}_state_steps_skipped_total"] <= found[f"{NAME}_state_steps_total"]
    whole, first = (
        found[f"{NAME}_{n}_seconds_sum"] for n in ("http_request", "time_to_first_token")
    )
    assert first < whole < 2 * (perf_counter() - started)  # requests follow one another
