"""`benchmarks/kernels/window.py` as far as it goes without a GPU."""

import pytest
import torch
import window


def test_both_errors_are_those_of_exact_states() -> None:
    case = window.Case(2, 8, torch.float32, "cpu")
    outputs, written = window.errors(window.Ours(case), case, steps=4)
    assert 0 < written < 1e-6
    assert outputs < 4e-3  # bfloat16


@pytest.mark.parametrize(("side", "share"), [((15, 1), 0.23), ((16, 0), 0.23), ((0, 1), 1.0)])
def test_rows_write_as_often_as_their_window_makes_them(
    side: tuple[int, int], share: float
) -> None:
    class Side:
        window, late = side

    path = window.steady(64, 4, 3.0, 40, Side)
    assert window._share(path) == pytest.approx(share, abs=0.03)
    for places in path:
        assert (places.writes | (places.pending + 4 <= side[0])).all()
