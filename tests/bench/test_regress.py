"""The comparison of two checkouts: which figures are one, and what their ratio is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "engine"))

import regress

ROOT = Path(__file__).parents[2]
VERIFY = next(script for script in regress.SCRIPTS if script.name == "verify")


def test_figures_are_named_by_what_they_are_of() -> None:
    rows = [{"state": "float16", "rows": 4, "tokens": 4, "update": 5.0, "replay": None, "floor": 1}]
    found = dict(regress.figures(VERIFY, {"gpu": rows, "other": rows}))
    assert found == {"verify state=float16 rows=4 tokens=4 update": 5.0}


def test_medians_of_what_both_have_measured_are_compared() -> None:
    measured = {
        "before": {"a": [1.0, 3.0], "gone": [1.0]},
        "after": {"a": [3.0, 3.0], "new": [1.0]},
    }
    (row,) = regress.compared(measured)
    assert (row["figure"], row["before"], row["after"], row["ratio"]) == ("a", 2.0, 3.0, 1.5)


def test_every_script_is_where_it_is_looked_for(tmp_path: Path) -> None:
    for script in regress.SCRIPTS:
        call = regress.command(ROOT, script, "1,2", tmp_path)
        assert Path(call[1]).is_file()
        assert not any("{" in option for option in call)


def test_a_checkout_is_importable(tmp_path: Path) -> None:
    package = regress.importable(ROOT, tmp_path / "tree") / "hybrid_runtime"
    assert {"kernels", "specdecode", "engine", "state"} <= {p.name for p in package.iterdir()}
