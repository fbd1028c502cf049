"""Marks and names of single cases of a parametrised test."""

from typing import Any

import pytest
import torch
from helpers.interpreter import INTERPRETED


def slow(*cases: Any) -> list[Any]:
    """The cases, left out of the quick loop (`-m "not slow"`)."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def cases(small: dict[str, Any], large: dict[str, Any]) -> list[Any]:
    """Cases by name; the large ones only on a GPU, and told of where they are skipped."""
    found = [pytest.param(case, id=name) for name, case in small.items()]
    if torch.cuda.is_available() or not INTERPRETED:
        found += [
            pytest.param(case, id=name, marks=pytest.mark.gpu) for name, case in large.items()
        ]
    return found
