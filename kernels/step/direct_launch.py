"""Kernels launched by their compiled handles, for launches of which a step waits for each."""

from __future__ import annotations

from typing import Any

from triton.compiler import CompiledKernel


class DirectLaunch:
    """A kernel that specialises on no number, and whose tensors are aligned alike in all launches
    or not specialised on either, so that one handle serves all launches with the same constexprs.
    Launching it directly skips the ordinary launcher's work on each argument's type, most of the
    host time of a small launch.

    kernel: its tensors and numbers come first, its constexprs last.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], CompiledKernel] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        """Launch by position, the first argument being a tensor."""
        key = (arguments[0].device, *constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *constants)
            return
        compiled = self._kernel[grid](*arguments, *constants)
        # It is none yet where it is compiled in the background, or interpreted.
        if isinstance(compiled, CompiledKernel):
            self._compiled[key] = compiled
