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
from helpers.quick_interpreter import quicken

CUDA = torch.cuda.is_available()
INTERPRETED = bool(triton.knobs.runtime.interpret)
kernels = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="runs in the interpreter's process")
elsewhere = pytest.mark.skipif(CUDA or INTERPRETED, reason="the kernels run in this process")

if INTERPRETED:
    quicken()


def run_in_interpreter(file: str, *options: str) -> None:
    """Run pytest on `file` with the interpreter on; its tests must pass, however long they take."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *options, file],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
