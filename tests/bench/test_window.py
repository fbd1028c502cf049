"""`benchmarks/kernels/window.py` as far as it goes without a GPU."""

import sys
from types import SimpleNamespace
from typing import Any

import flashinfer_peer
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


def test_flashinfers_forms_are_launched_programmatically_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each by the module that was built for it, with what its one or two kernels need."""
    launched: list[tuple[bool, tuple[Any, ...]]] = []

    def built(enable_pdl: bool, **types: Any) -> Any:
        assert (types["state_dtype"], types["npredicted"]) == (torch.float16, 4)
        call = SimpleNamespace(checkpointing_ssu=lambda *a: launched.append((enable_pdl, a)))
        return SimpleNamespace(build_and_load=lambda: call)

    name = "flashinfer.jit.mamba.checkpointing_ssu"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(gen_checkpointing_ssu_module=built))
    monkeypatch.delenv("FLASHINFER_MODULES", raising=False)
    side: Any = flashinfer_peer.flashinfer_side.__wrapped__(torch.float16, 4)
    case = window.Case(1, 4, torch.float16, "cpu")
    one = side(case)
    places = window.Places(*torch.zeros(3, 1, dtype=torch.int64))
    state, cache = torch.zeros(1, 128, 64, 128), one.cache()
    forms = one.forms()
    for form in forms:
        form.run(state, cache, one.positions(places), case.mixed)
    assert len(forms) == len(launched) == 124
    for form, (pdl, given) in zip(forms, launched, strict=True):
        two, stages, programs, heads, split, programmatic = form.form
        scratch = form.scratch if two else (None, None, None)
        assert pdl == programmatic
        assert all(a is b for a, b in zip(given[-6:-3], scratch, strict=True))
        assert (given[-8], *given[-3:]) == (split, heads, stages, programs)


def test_no_module_no_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FLASHINFER_MODULES", str(tmp_path))
    assert flashinfer_peer.flashinfer_side.__wrapped__(torch.float32, 4) is None
