"""`benchmarks/engine/public_client.py` writes where it is told to, and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine" / "public_client.py"


def test_no_output_path_is_refused_before_anything_runs() -> None:
    ran = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "--out" in ran.stderr
