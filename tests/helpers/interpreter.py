"""Kernels without a GPU: in Triton's interpreter, in a process of their own.

Triton decides when it is imported whether kernels are interpreted, so a test file starts itself
again with TRITON_INTERPRET=1, and its tests of kernels run in there.
"""

import os
import subprocess
import sys

import pytest
import torch
import triton
from helpers.interpreter_changes import quicken

CUDA = torch.cuda.is_available()
INTERPRETED = bool(triton.knobs.runtime.interpret)
# Who runs where is decided by `pytest_collection_modifyitems` in conftest.py.
kernels = pytest.mark.kernels
elsewhere = pytest.mark.interpreter
plain = pytest.mark.plain

if INTERPRETED:
    quicken()


def run_in_interpreter(file: str, *options: str) -> None:
    """Run pytest on `file` with the interpreter on, those of its tests that this run has not left
    out by `-m` (there may be none); they must pass, however long they take."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", os.environ["PYTEST_MARKEXPR"]]
    done = subprocess.run(
        [*command, *options, file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    wanted = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert done.returncode in wanted, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode or " passed" in done.stdout
