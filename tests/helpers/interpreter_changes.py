"""What tests change in Triton's interpreter."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """For the rest of a process in which kernels are interpreted: leave out work that it does over
    and over. Twice as fast, and the same."""
    builder = interpreter.interpreter_builder
    # It works out whether each sum and product overflows, and tells nobody without `debug`.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    plainly = interpreter._get_np_dtype
    of_scalar = cache(plainly)

    def np_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        return plainly(scalar) if scalar.is_ptr() else of_scalar(scalar)

    interpreter._get_np_dtype = np_dtype

    # It patches triton.language anew whenever a function calls another.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()


def round_to_nearest() -> None:
    """For the rest of a process in which kernels are interpreted: the interpreter cuts the bits off
    that bfloat16 lacks, loses the carry where it rounds to 8 bits, and multiplies NaN of 8 bits as
    if it were 480."""
    builder = interpreter.InterpreterBuilder

    def rounding(plainly: Any, type_: tl.dtype, rounded: torch.dtype, bits: torch.dtype) -> Any:
        def convert(self: Any, src: Any, to: Any, *mode: Any) -> Any:
            if to.scalar != type_ or src.dtype.scalar != tl.float32:
                return plainly(self, src, to, *mode)
            data = torch.from_numpy(src.data).to(rounded).view(bits).numpy()
            return interpreter.TensorHandle(data, type_)

        return convert

    builder.create_fp_to_fp = rounding(
        builder.create_fp_to_fp, tl.float8e4nv, torch.float8_e4m3fn, torch.uint8
    )
    builder.create_fp_trunc = rounding(
        builder.create_fp_trunc, tl.bfloat16, torch.bfloat16, torch.uint16
    )

    plain_dot = builder.create_dot

    def half(operand: Any) -> Any:
        if operand.dtype.scalar != tl.float8e4nv:
            return operand
        values = torch.from_numpy(operand.data).view(torch.float8_e4m3fn).half()
        return interpreter.TensorHandle(values.numpy(), tl.float16)

    builder.create_dot = lambda self, a, b, *more: plain_dot(self, half(a), half(b), *more)
