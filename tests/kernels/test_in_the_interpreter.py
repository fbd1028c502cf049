"""Small files' kernels without a GPU, several in each interpreter: to start one takes seconds.

Larger files start their own, see helpers/interpreter.py."""

from pathlib import Path

import pytest
from helpers.interpreter import elsewhere, plain, run_in_interpreter

HERE = Path(__file__).parent
TOGETHER = (
    ("advance_columns", "penalties", "pooling", "sampling"),
    ("layers", "step", "topk"),
)


@elsewhere
@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_kernels_of_small_files(names: tuple[str, ...]) -> None:
    run_in_interpreter(*(str(HERE / f"test_{name}.py") for name in names))


@plain
def test_no_file_is_forgotten() -> None:
    together = [f"test_{name}.py" for names in TOGETHER for name in names]
    for path in HERE.glob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__) and "\n@kernels\n" in text:
            assert ("run_in_interpreter(__file__" in text) != (path.name in together), path
