"""Marks on single cases of a parametrised test."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """The cases, left out of the quick loop (`-m "not slow"`)."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]
