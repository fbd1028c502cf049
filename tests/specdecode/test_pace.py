"""When the next step must be queued, on a device whose clock is made up."""

from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.specdecode.pace import MARGIN, Pace
from hybrid_runtime.specdecode.shape import StepShape

SIZES = st.tuples(st.integers(0, 64), st.integers(0, 4096)).filter(any)
SHAPES = st.tuples(SIZES, st.integers(0, 7)).map(lambda drawn: (*drawn[0], drawn[1]))
"""Rows that decode, prompt tokens, and drafts of a row."""
LEAD = 1e-3


def shape_of(rows: int, prompt_tokens: int, drafts: int = 3) -> StepShape:
    return StepShape(rows, (drafts + 1) * rows, int(prompt_tokens > 0), prompt_tokens)


def cost_of(rows: int, prompt_tokens: int, drafts: int = 3) -> float:
    """Never less for more; the same within what Pace holds for one size."""
    rows = -(-rows // 8)
    return 4e-3 + 1e-3 * rows * (1 + drafts / 2) + 5e-3 * -(-prompt_tokens // 256)


class Device:
    """Runs steps one after the other; the host queues one behind the one that runs."""

    def __init__(self) -> None:
        self.pace = Pace()
        self.now = self.free = self.idle = 0.0
        self.queued: list[tuple[int, float]] = []
        self.number = 0

    def step(self, rows: int, prompt_tokens: int, drafts: int = 3, late: float = 0.0) -> float:
        """Wait as long as Pace says and `late` more, queue a step, read the one before; how long
        it has waited."""
        spare = self.pace.spare(self.now)
        self.now += spare + late
        self.pace.begin(self.now)
        self.now += LEAD
        if self.queued:
            self.idle += max(self.now - self.free, 0.0)
        self.free = max(self.free, self.now) + cost_of(rows, prompt_tokens, drafts)
        self.number += 1
        self.pace.queued(self.number, shape_of(rows, prompt_tokens, drafts), self.now)
        self.queued.append((self.number, self.free))
        if len(self.queued) > 1:
            number, done = self.queued.pop(0)
            asked, self.now = self.now, max(self.now, done)
            self.pace.read(number, asked, self.now + 1e-6)
            self.now += 1e-6
        return spare


@given(st.lists(SHAPES, min_size=1, max_size=40))
def test_the_device_never_waits_for_a_late_step(steps: list[tuple[int, int, int]]) -> None:
    device = Device()
    for shape in steps:
        device.step(*shape)
    assert device.idle == 0


@given(st.lists(SHAPES.filter(lambda shape: shape[0] > 0), min_size=1, max_size=6))
def test_what_is_known_is_waited_for(steps: list[tuple[int, int, int]]) -> None:
    device = Device()
    for rows, _, drafts in steps * 4:
        device.step(rows, 0, drafts)
    for shape in steps * 4:
        device.step(*shape)
    for shape in steps:
        device.step(*shape)
        left = device.free - device.now
        assert device.pace.spare(device.now) > left - LEAD - MARGIN - 1e-4


def test_one_slow_step_is_no_reason_to_wait_longer() -> None:
    device = Device()
    for number in range(20):
        device.step(8, 0)
        if number == 10:
            device.free += 5.0
    assert device.pace.spare(device.now) < cost_of(8, 0)


def test_a_host_that_wakes_up_late_is_called_earlier() -> None:
    device = Device()
    for _ in range(10):
        device.step(8, 0)
    device.step(8, 0, late=2e-3)
    before = device.idle
    for _ in range(5):
        device.step(8, 0, late=2e-3)
    assert device.idle == before > 0


def test_results_that_are_read_late_are_no_longer_step() -> None:
    """The host was late without being asked: what it then measures is its own time."""
    device = Device()
    for _ in range(10):
        device.step(8, 0)
    expected = device.pace.spare(device.now)
    for _ in range(10):
        device.now = device.free + 3e-3
        device.step(8, 0)
        assert device.pace.spare(device.now) <= expected


def test_nothing_is_waited_for_before_anything_is_known_or_queued() -> None:
    pace = Pace()
    assert pace.spare(1.0) == 0
    for number in range(3):
        pace.begin(float(number))
        pace.queued(number, shape_of(4, 0), float(number))
        assert pace.spare(float(number)) == 0
        pace.read(number, number + 0.5, number + 0.9)
    assert pace.spare(3.0) == 0
    pace.begin(3.0)
    pace.queued(3, shape_of(4, 0), 3.0)
    assert pace.spare(3.0) > 0.5
    pace.read(4, 9.0, 9.5)  # step 3 was given up
    assert pace.spare(9.5) == 0


def test_fewer_drafts_are_no_longer_step() -> None:
    device = Device()
    for drafts in (7, 0, 3, 7, 1):
        for _ in range(10):
            device.step(64, 0, drafts)
    assert device.idle == 0
