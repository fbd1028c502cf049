"""Benchmarks are scripts, which import each other by name: their folders go on sys.path."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS / folder) for folder in ("engine", "kernels", "common", "tables")]
