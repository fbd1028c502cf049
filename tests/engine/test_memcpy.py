"""Batches of copies: joined where they may be, and handed to the driver in its form."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_runtime.engine.offload.memcpy import Copies, _batch, merged, paths

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def run(copies: Copies) -> None:
    paths(CPU)[0].submit(copies, 0)


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=12))
def test_merged_copies_do_the_same(pairs: list[tuple[int, int]]) -> None:
    pairs = list({dst: (dst, src) for dst, src in pairs}.values())
    source = np.arange(60, dtype=np.uint8)
    results = []
    for change in (lambda c: c, merged):
        target = np.zeros(60, np.uint8)
        copies = change(
            Copies(
                np.array([target.ctypes.data + 3 * d for d, _ in pairs], np.int64),
                np.array([source.ctypes.data + 3 * s for _, s in pairs], np.int64),
                np.full(len(pairs), 3, np.int64),
            )
        )
        run(copies)
        results.append((target, len(copies.size)))
    (plain, _), (joined, count) = results
    assert (plain == joined).all()
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(pairs)]
    assert count == (1 + sum(step != (1, 1) for step in steps) if pairs else 0)


POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
FORM = [POINTER, POINTER, POINTER, SIZE, POINTER, POINTER, SIZE]


@pytest.mark.parametrize("tells_index", [False, True])
def test_the_batch_call_has_the_arguments_of_its_form(tells_index: bool) -> None:
    """A C function with the signature that cuda.h gives, in the driver's place."""
    code = 0

    def cu_memcpy_batch_async(dst: int, src: int, size: int, count: int, *rest: int) -> int:
        attributes, applies_from, number, *index, stream = rest
        # In CUmemcpyAttributes: stream order, no hints of a location, no flags.
        assert list((ctypes.c_uint32 * 6).from_address(attributes)) == [1, 0, 0, 0, 0, 0]
        assert SIZE.from_address(applies_from).value == 0
        assert (number, stream, len(index)) == (1, 77, tells_index)
        lists = [list((ctypes.c_uint64 * count).from_address(a)) for a in (dst, src, size)]
        if code:
            for where in index:
                SIZE.from_address(where).value = 1
            return code
        for copy in zip(*lists, strict=True):
            ctypes.memmove(*copy)
        return 0

    form = ctypes.CFUNCTYPE(ctypes.c_int, *FORM, *[POINTER] * tells_index, POINTER)
    function = form(cu_memcpy_batch_async)
    submit = _batch(ctypes.cast(function, POINTER).value or 0, tells_index)
    source, target = np.arange(9, dtype=np.uint8), np.zeros(9, np.uint8)
    # Every other element: the driver reads consecutive ones.
    starts, sizes = np.array([0, -1, 4, -1])[::2], np.array([2, -1, 5, -1])[::2]
    copies = Copies(starts + target.ctypes.data, starts + source.ctypes.data, sizes)
    submit(copies, 77)
    assert target.tolist() == [0, 1, 0, 0, 4, 5, 6, 7, 8]
    submit(Copies(*(a[:0] for a in copies)), 0)  # nothing to do: no call
    code = 1
    message = "of 2 copies: CUresult 1" + (", copy 1" if tells_index else "") + "$"
    with pytest.raises(RuntimeError, match=message):
        submit(copies, 77)


@pytest.mark.gpu
def test_what_the_driver_refuses_is_an_error() -> None:
    host = torch.zeros(16, pin_memory=True)
    copy = Copies(*(np.full(1, n) for n in (host.data_ptr(), host[8:].data_ptr(), 32)))
    for path in paths(GPU)[:-1]:
        with pytest.raises(RuntimeError, match="of 1 copies: CUresult"):
            path.submit(copy, 0)  # the legacy default stream
