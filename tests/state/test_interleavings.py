"""Steps that begin, run, end and are read at any time, in any order and with anything in between:
see `helpers.interleavings`."""

from __future__ import annotations

import pytest
from helpers.interleavings import Interleavings
from hypothesis import settings


class ReplayInterleavings(Interleavings):
    kind = "replay"


TestInterleavings = pytest.mark.slow(Interleavings.TestCase)
TestReplayInterleavings = pytest.mark.slow(ReplayInterleavings.TestCase)
TestInterleavings.settings = TestReplayInterleavings.settings = settings(
    max_examples=100, stateful_step_count=40
)
