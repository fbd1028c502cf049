"""Which tables are older than the code that they are about, by git."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STATE_UPDATE = ("kernels/mamba2", "kernels/replay")
DECODE = ("hybrid_runtime/engine", "hybrid_runtime/models", "hybrid_runtime/state", "kernels")
"""The engine's steps, from the scheduler to the kernels."""
PLUGIN = ("hybrid_runtime/integrations/vllm", *STATE_UPDATE)
COPIES = ("hybrid_runtime/integrations/vllm", "kernels/step")
FP8 = (
    "hybrid_runtime/models/formats.py", "hybrid_runtime/models/linear.py", "kernels/linear",
    "kernels/moe",
)  # fmt: skip
"""What rounds weights and multiplies with them."""
CODE: dict[str, tuple[str, ...]] = {
    "acceptance": ("hybrid_runtime/checkpoints/python-small/model.safetensors", "specdecode"),
    "capacity": DECODE,
    "capture": DECODE,
    "chat": DECODE,
    "draft-head": ("kernels/sampling/narrow_head.py",),
    "drafts": ("hybrid_runtime/engine", "hybrid_runtime/models", "kernels", "specdecode"),
    "drafts-by-row": ("specdecode/draft_length.py", "specdecode/row_acceptance.py"),
    "eviction": (
        "hybrid_runtime/engine/eviction.py",
        "hybrid_runtime/engine/prefix_cache.py",
        "hybrid_runtime/engine/reuse.py",
    ),
    "fp8-accuracy": FP8,
    "fp8-large": DECODE,
    "fp8-products": ("kernels/linear",),
    "fp8-steps": DECODE,
    "fp8-texts": (*FP8, "hybrid_runtime/checkpoints/python-small/model.safetensors"),
    "gdn": ("kernels/gdn", "kernels/replay"),
    "guidellm": ("hybrid_runtime/server", "hybrid_runtime/engine"),
    "host": ("hybrid_runtime/state", "kernels/step"),
    "itl-strategies": DECODE,
    "lockstep": DECODE,
    "numerics": STATE_UPDATE,
    "plain-decode": DECODE,
    "postcopy": ("kernels/step",),
    "prefix": DECODE,
    "prefix-short": DECODE,
    "products": (),  # PyTorch's
    "sampling": ("kernels/sampling",),
    "serving": DECODE,
    "serving-arrivals": DECODE,
    "serving-budgets": DECODE,
    "serving-queueing": DECODE,
    "serving-smaller": DECODE,
    "soak": DECODE,
    "soak-http": ("hybrid_runtime/server", "hybrid_runtime/engine"),
    "vllm-checked": PLUGIN,
    "vllm-gained": PLUGIN,
    "vllm-histories": ("hybrid_runtime/integrations/vllm",),
    "vllm-poisoned": PLUGIN,
    "vllm-qwen-steps": ("hybrid_runtime/integrations/vllm", "kernels/gdn", "kernels/replay"),
    "vllm-releases": ("hybrid_runtime/integrations/vllm",),
    "vllm-replay-steps": PLUGIN,
    "vllm-replay-texts": PLUGIN,
    "vllm-served": PLUGIN,
    "vllm-serving": COPIES,
    "vllm-timing": COPIES,
    "window": STATE_UPDATE,
}
"""Name of each table that is made from results, to the code that it is about. What is outside of
it, such as the benchmark's own script, may change."""
NOTE = re.compile(r"Measured (?:before changes to|at a commit that) [^|\n]*\.\Z")
"""The sentence that ends the caption of such a table."""


def commits(result: dict[str, Any]) -> set[str]:
    """Those that measured a result, and its parts where it was merged from several."""
    releases = result.get("releases", {})
    parts = [result.get("environment"), *result.get("runs", []), *releases.values()]
    found = {part.get("commit") for part in parts if isinstance(part, dict)}
    return {commit.removesuffix("-dirty") for commit in found if commit}


def note(root: Path, measured: Iterable[str], paths: Iterable[str]) -> str | None:
    """What the caption of a table says that was measured at these commits; empty if nothing below
    these paths differs from then, but for comments and docstrings. None: there is no history at
    `root` that could tell, as in an archive or in a shallow clone."""
    if not _has_history(root):
        return None
    lost = sorted(commit for commit in measured if not _known(root, commit))
    if lost:
        return f"Measured at a commit that this history does not have: {', '.join(lost)}."
    changed = [
        path for path in paths if any(_changed(root, commit, path) for commit in sorted(measured))
    ]
    if not changed:
        return ""
    *most, last = (f"`{path}`" for path in changed)
    return f"Measured before changes to {', '.join(most)}{' and ' if most else ''}{last}."


@functools.cache
def _has_history(root: Path) -> bool:
    if _git(root, "rev-parse", "--is-shallow-repository") != "false":
        return False
    top = _git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == root.resolve()


@functools.cache
def _known(root: Path, commit: str) -> bool:
    return _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is not None


@functools.cache
def _changed(root: Path, commit: str, path: str) -> bool:
    """Between then and the files as they lie there, so that who changes the code can write the
    captions in the same commit."""
    differ = _git(root, "diff", "--name-only", commit, "--", path) or ""
    added = _git(root, "ls-files", "--others", "--exclude-standard", "--", path) or ""
    for name in (*differ.splitlines(), *added.splitlines()):
        now = root / name
        before = _git(root, "show", f"{commit}:{name}")
        if before is None or not now.exists() or now.suffix != ".py":
            return True
        if _code(before) != _code(now.read_text()):
            return True
    return False


@functools.cache
def _code(text: str) -> str:
    """A program without comments, docstrings and layout."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _does_nothing(line)]
    return ast.dump(tree)


def _does_nothing(line: ast.stmt) -> bool:
    if isinstance(line, ast.ImportFrom):
        return line.module == "__future__"
    return isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)


def _git(root: Path, *words: str) -> str | None:
    """What it prints; None: it failed, or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None
