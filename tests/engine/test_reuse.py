"""What checkpoints are worth, by what was observed of them and their like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.engine.reuse import HALF_LIFE, WINDOW, Kind, Reuse

EVENT = st.tuples(st.sampled_from(["leave", "go on"]), st.integers(0, 7), st.floats(0, 3))


@given(events=st.lists(EVENT, max_size=30), later=st.floats(0, 20))
def test_what_nobody_touches_is_worth_less_and_less_beside_what_is_new(
    events: list[tuple[str, int, float]], later: float
) -> None:
    """So what a block was worth when it was last touched is never too little."""
    reuse, now, keys = Reuse(8), 0.0, set[bytes]()
    for act, number, passed in events:
        key, now = bytes([number]), now + passed
        keys.add(key)
        if act == "leave":
            reuse.leave(key, Kind.TURN, 100 << number, now)
        else:
            reuse.go_on(key, now)
    for key in keys:
        then = reuse.worth(key, now + later) - later / HALF_LIFE
        assert then <= reuse.worth(key, now) + 1e-9


def test_who_is_gone_on_from_is_worth_more_and_less_again_later() -> None:
    reuse = Reuse(8)
    for key in (b"one", b"two"):
        reuse.leave(key, Kind.TURN, 100, 0.0)
    for now in (1.0, 2.0, 3.0):
        reuse.go_on(b"one", now)
    assert reuse.worth(b"one", 3.0) > reuse.worth(b"two", 3.0) + 1
    reuse.leave(b"three", Kind.TURN, 100, 30.0)
    assert reuse.worth(b"one", 3.0) < reuse.worth(b"three", 30.0)


@pytest.mark.parametrize("shared", [False, True])
def test_a_newer_end_inherits_unless_others_went_on_there_too(shared: bool) -> None:
    reuse = Reuse(8)
    reuse.leave(b"older", Kind.TURN, 100, 0.0)
    for _ in range(1 + shared):
        reuse.go_on(b"older", 0.0)
    reuse.leave(b"newer", Kind.TURN, 200, 0.0, b"older")
    reuse.leave(b"fresh", Kind.TURN, 200, 0.0)
    inherited = reuse._seen[b"newer"].heat
    assert inherited == (0.0 if shared else 1.0)
    assert (reuse.worth(b"newer", 0.0) > reuse.worth(b"fresh", 0.0)) == (not shared)


def test_what_none_of_its_like_was_used_for_is_worth_little() -> None:
    """A kind, and in it a depth; however many there are, a change is noticed."""
    reuse = Reuse(4 * WINDOW)
    for number in range(3 * WINDOW):
        reuse.leave(b"document %d" % number, Kind.TURN, 20000, 0.0)
        reuse.leave(b"chat %d" % number, Kind.TURN, 2000, 0.0)
        reuse.go_on(b"chat %d" % number, 0.0)
    reuse.leave(b"document", Kind.TURN, 20001, 0.0)
    reuse.leave(b"chat", Kind.TURN, 2001, 0.0)
    reuse.leave(b"other kind", Kind.NAMED, 20001, 0.0)
    unused = reuse.worth(b"document", 0.0, 20001)
    assert unused < reuse.worth(b"chat", 0.0, 2001)
    assert unused < reuse.worth(b"other kind", 0.0, 20001)
    assert max(reuse._left.values()) <= WINDOW
    for number in range(WINDOW // 2):
        reuse.leave(b"again %d" % number, Kind.TURN, 20000, 0.0)
        reuse.go_on(b"again %d" % number, 0.0)
    assert reuse.worth(b"document", 0.0, 20001) > unused + 5


def test_only_so_many_are_remembered_those_that_were_used_last() -> None:
    reuse = Reuse(2)
    for key in (b"one", b"two"):
        reuse.leave(key, Kind.TURN, 1, 0.0)
    reuse.go_on(b"one", 0.0)
    reuse.leave(b"three", Kind.TURN, 1, 0.0)
    assert [key in reuse for key in (b"one", b"two", b"three")] == [True, False, True]
    reuse.forget(b"one")
    reuse.go_on(b"one", 1.0)
    assert b"one" not in reuse


@given(
    left=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5)), max_size=6),
    count=st.integers(0, 12),
)
def test_keys_are_worth_what_the_best_checkpoint_behind_them_is(
    left: list[tuple[int, int]], count: int
) -> None:
    reuse, size = Reuse(9), 4
    for position, number in left:
        reuse.leave(bytes([number]), Kind.TURN, position, 0.0)
        reuse.go_on(bytes([number]), 0.0)
    found = reuse.along([(at, bytes([n])) for at, n in left], count, size, 1.0)
    least = reuse.worth(b"nobody", 1.0)
    assert found == [
        max([least, *(reuse.worth(bytes([n]), 1.0) for at, n in left if at > block * size)])
        for block in range(count)
    ]
