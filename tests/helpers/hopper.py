"""Compiles kernels for a Hopper GPU, on machines without one."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    "entries", "step", "accepted", "slot_computed", "slot_held", "slot_offset", "previous",
    "placed", "read_column", "read_offset", "write_column", "moves", "blocks",
    "block_table", "slot", "cu_seqlens", "draft", "checkpoint_column",
    "checkpoint_after", "column", "computed", "arrived", "row_slot", "row_draft", "row_offset",
    "row_pending", "row_cursor", "row_certain", "tables", "flush_slot", "flush_offset",
    "flush_pending", "flush_cursor", "flush_column",
    "flush_certain", "cut", "cut_after", "cut_column",
}  # fmt: skip
TYPES = {
    "addresses": "*i64", "value": "fp32", "x": "*bf16", "out": "*bf16", "weight": "*bf16",
    "bias": "*bf16", "conv_states": "*bf16", "dt": "*bf16", "B": "*bf16", "C": "*bf16",
    "A_log": "*fp32", "D": "*fp32", "dt_bias": "*fp32", "dt_min": "fp32", "dt_max": "fp32",
    "states": "*fp32", "totals": "*i64", "hidden": "*bf16", "sums": "*fp32",
}  # fmt: skip


def compiled(
    kernel: JITFunction,
    constants: dict[str, Any],
    multiples: Sequence[str] = (),
    options: dict[str, int] | None = None,
    **types: str | tuple[Any, ...],
) -> Any:
    """Compile for a Hopper GPU.

    Args:
        kernel: what to compile.
        constants: values of constexpr arguments and of strides that are 1.
        multiples: arguments that are multiples of 16, as launches find out by themselves; all
            entries of a tuple at once.
        options: of the launch: num_warps, num_stages.
        types: of the other arguments; of a tuple those of its entries, constants as values.
    """
    given = {"PDL": True, "LINE": 64, "PARTS": 2}
    constants = {name: given[name] for name in kernel.arg_names if name in given} | constants
    known: dict[str, Any] = TYPES | types
    signature: dict[str, Any] = {}
    values: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        type_ = known.get(name, "*i32" if name in POINTERS else "i32")
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
        elif isinstance(type_, tuple):
            entries = ["constexpr" if not isinstance(entry, str) else entry for entry in type_]
            signature[name] = type(type_)(*entries)
            paths: dict[tuple[int, ...], Any] = {(index, i): entry for i, entry in enumerate(type_)}
            values |= {path: entry for path, entry in paths.items() if not isinstance(entry, str)}
        else:
            signature[name] = type_
            paths = {(index,): type_}
        if name in multiples and name not in constants:
            found = [path for path in paths if path not in values]
            attributes |= {path: [["tt.divisibility", 16]] for path in found}
    source = ASTSource(kernel, signature, values, attributes)
    options = options or {"num_warps": 2 if multiples else 4}
    code = compile_kernel(source, target=HOPPER, options=options)
    if "PDL" in kernel.arg_names:
        ahead, wait, _ = code.asm["ptx"].partition("griddepcontrol.wait")
        assert wait
        # Only a hint like prefetch may come before.
        assert not re.search(r"\b(ld|st|atom|red|cp)\.(global|async)", ahead)
    return code


def spilled(code: Any, folder: Path) -> int:
    """Bytes of stack of a compiled kernel: what did not fit into registers."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(code.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"STACK:(\d+)", report)
    assert found
    return int(found[1])


def spilled_in_copying_loop(code: Any, folder: Path) -> int:
    """How often the shortest loop that copies to shared memory accesses local memory, where
    registers go that do not fit."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(code.asm["cubin"])
    command = [triton.knobs.nvidia.nvdisasm.path, str(cubin)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = []
    for jump in re.finditer(r"BRA.*`\((\.L_x_\d+)\)", text):
        start = text.find(f"\n{jump[1]}:", 0, jump.start())
        if start >= 0:
            loops.append(text[start : jump.end()])
    copying = min((loop for loop in loops if "LDGSTS" in loop), key=len)
    return len(re.findall(r"\b(LDL|STL)\b", copying))


def aligned(kernel: JITFunction, constants: dict[str, Any]) -> list[str]:
    loose = {
        "tokens",
        "rows",
        "chunks",
        "dt_min",
        "dt_max",
        "D",
        "A_log",
        "dt_bias",
        "table_stride",
    }
    return [name for name in kernel.arg_names if name not in {*constants, *POINTERS, *loose}]
