"""The short form of `numerics.py`: drift from fp64 in both layouts, over 500 tokens."""

import numerics
import pytest
import torch


@pytest.mark.slow
def test_replay_drifts_no_further_than_columns() -> None:
    trial = numerics.Trial(2, 1, 1, "cuda" if torch.cuda.is_available() else "cpu")
    assert trial.run(500) >= 500
    assert max(trial.difference().values()) <= 2e-5
    rows = {(r["state"], r["layout"], r["rounding"]): r for r in trial.results()}
    assert len(rows) == 8
    for (state, layout, rounding), row in rows.items():
        limit = {"float32": 2e-5, "float16": 0.02, "bfloat16": 0.15}[state]
        assert 0 < max(row["outputs"], row["final state"]) < limit
        if layout == "replay" and rounding == "to nearest":
            columns = rows[state, "columns", rounding]
            assert row["outputs rms"] <= 1.1 * columns["outputs rms"]
