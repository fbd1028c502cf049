"""Many copies of memory, given to the driver at once.

CUDA 12.8 brought `cuMemcpyBatchAsync`, 13.0 another form of it. What counts is what the driver has,
not the CUDA version torch was built with. Its Python binding takes lists, which it converts element
by element, so the entry point is called with the addresses of NumPy arrays.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Copies(NamedTuple):
    """Copies of `size` bytes from address `src` to address `dst`; int64 `[n]` each.

    They may run in any order, so that no copy may touch what another one writes.
    """

    dst: Int64s
    src: Int64s
    size: Int64s


class CopyPath(NamedTuple):
    """A way to submit copies: its name, and `submit(copies, stream)`.

    stream: a CUstream, not the legacy default stream; 0 on the CPU, where `submit` returns when the
    bytes are there. Raises `RuntimeError` when the driver refuses; part of the copies may run then.
    """

    name: str
    submit: Callable[[Copies, int], None]


# Per CUDA version that brought a form: its name in the driver's library, and whether it has
# `size_t *failIdx` before the stream.
_FORMS = {13000: ("cuMemcpyBatchAsync_v2", False), 12080: ("cuMemcpyBatchAsync", True)}
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


def merged(copies: Copies) -> Copies:
    """The same copies, neighbours in the list that continue each other on both sides joined.

    Joined copies must lie in one allocation, which the driver insists on: where allocations could
    be neighbours on both sides, the caller leaves a gap on one.
    """
    dst, src, size = copies
    if not len(size):
        return copies
    step = np.subtract(dst[1:], dst[:-1])
    joins = step == size[:-1]
    joins &= np.subtract(src[1:], src[:-1], out=step) == size[:-1]
    if not joins.any():
        return copies
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    return Copies(dst[starts], src[starts], np.add.reduceat(size, starts))


def paths(device: torch.device) -> list[CopyPath]:
    """What works on `device`, best first. Raises `RuntimeError` where CUDA's library is missing."""
    if device.type != "cuda":
        return [CopyPath("memmove", _memmove)]
    library = _library()
    if library is None:
        raise RuntimeError("libcuda.so.1 cannot be loaded; copies need NVIDIA's driver")
    found = []
    for version, (symbol, tells_index) in _FORMS.items():
        address = _address(library, version, symbol)
        if address:
            name = f"cuMemcpyBatchAsync of CUDA {version // 1000}.{version % 1000 // 10}"
            found.append(CopyPath(name, _batch(address, tells_index)))
    return [*found, CopyPath("loop of cuMemcpyAsync", _runner(library.cuMemcpyAsync))]


def driver_version() -> int | None:
    """CUDA version of the driver, as in 13000 for 13.0; None without one."""
    library, version = _library(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _address(library: ctypes.CDLL, version: int, symbol: str) -> int:
    """Address of the form that CUDA `version` brought; 0 when the driver does not have it."""
    # Asked for a version it does not know, a driver may give an older form, with other arguments.
    if (driver_version() or 0) < version:
        return 0
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        function = getattr(library, symbol, None)
        return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0
    error, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", version, 0)
    return 0 if int(error) else int(address or 0)


def _batch(address: int, tells_index: bool) -> Callable[[Copies, int], None]:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    index = [pointer] if tells_index else []
    form = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, *index, pointer
    )
    call: Callable[..., int] = form(address)
    # One CUmemcpyAttributes (order, two locations of two words as hints, flags) for all copies.
    attributes = np.array([_IN_STREAM_ORDER, 0, 0, 0, 0, 0], np.uint32)
    applies_from = np.zeros(1, np.int64)

    def submit(copies: Copies, stream: int) -> None:
        count = len(copies.size)
        if not count:
            return
        arrays = [np.ascontiguousarray(a, np.int64) for a in (*copies, applies_from)]
        dst, src, sizes, first = (a.ctypes.data for a in arrays)
        failed = size(count)
        where = [ctypes.byref(failed)] if tells_index else []
        code = call(dst, src, sizes, count, attributes.ctypes.data, first, 1, *where, stream)
        if code:
            which = f", copy {failed.value}" if failed.value < count else ""
            raise RuntimeError(f"cuMemcpyBatchAsync of {count} copies: CUresult {code}{which}")

    return submit


def _runner(function: Any) -> Callable[[Copies, int], None]:
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def submit(copies: Copies, stream: int) -> None:
        for i, copy in enumerate(zip(*(a.tolist() for a in copies), strict=True)):
            code = function(*copy, stream)
            if code:
                raise RuntimeError(f"cuMemcpyAsync: CUresult {code}, copy {i}")

    return submit


def _memmove(copies: Copies, stream: int) -> None:
    for dst, src, size in zip(*(a.tolist() for a in copies), strict=True):
        ctypes.memmove(dst, src, size)
