"""Kernels without a GPU, several files in each interpreter: to start one takes seconds.

Other files start their own, see helpers/interpreter.py."""

from pathlib import Path

import pytest
from helpers.interpreter import elsewhere, plain, run_in_interpreter
from helpers.marks import slow

HERE = Path(__file__).parent
QUICK = (
    ("advance_columns", "penalties", "pooling", "sampling"),
    ("gdn_scan", "layers", "step", "topk"),
    ("fp8_moe", "fp8_product", "narrow_head"),  # which have the interpreter round as GPUs do
)
SLOW = (("conv", "ssm"), ("cuts", "moe"), ("state_copy", "vllm_rows"))


@elsewhere
@pytest.mark.parametrize("names", [*QUICK, *slow(*SLOW)], ids="-".join)
def test_kernels_of_several_files(names: tuple[str, ...]) -> None:
    run_in_interpreter(*(str(HERE / f"test_{name}.py") for name in names))


@plain
def test_no_file_is_forgotten() -> None:
    together = [f"test_{name}.py" for names in (*QUICK, *SLOW) for name in names]
    for path in HERE.glob("test_*.py"):
        text = path.read_text()
        if path != Path(__file__) and "\n@kernels\n" in text:
            assert ("run_in_interpreter(__file__" in text) != (path.name in together), path
