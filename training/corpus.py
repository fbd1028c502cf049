"""The text: Python's standard library as bytes, some files left out for evaluation."""

import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from .shapes import END_OF_TEXT

#: One file in twenty is left out, chosen by the hash of its relative path.
LEFT_OUT_OF = 20
#: Tables and generated text rather than programs.
SKIPPED_PARTS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib2to3"}
)
MAX_FILE_BYTES = 400_000


def default_root() -> Path:
    """The standard library of the running interpreter."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_left_out(relative: str) -> bool:
    """Whether a file (its path below the library's root, with ``/``) is kept for evaluation."""
    return int.from_bytes(hashlib.sha256(relative.encode()).digest()[:4], "big") % LEFT_OUT_OF == 0


def read_files(root: Path) -> tuple[list[bytes], list[bytes]]:
    """Read the library below ``root``: (training files, left-out files), each in path order."""
    train: list[bytes] = []
    left_out: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_PARTS.intersection(relative.parts):
            continue
        text = path.read_bytes()
        if 0 < len(text) <= MAX_FILE_BYTES:
            (left_out if is_left_out(relative.as_posix()) else train).append(text)
    if not train or not left_out:
        raise ValueError(f"root: {root} holds too few .py files; it must be a standard library")
    return train, left_out


def join(files: list[bytes]) -> np.ndarray:
    """One int16 array of byte values, each file followed by the end-of-text token."""
    parts: list[np.ndarray] = []
    for text in files:
        parts.append(np.frombuffer(text, dtype=np.uint8).astype(np.int16))
        parts.append(np.array([END_OF_TEXT], dtype=np.int16))
    return np.concatenate(parts)


def windows(files: list[bytes], length: int, count: int) -> np.ndarray:
    """``count`` windows int64 [count, length], spread evenly over the joined files."""
    stream = join(files)
    starts = np.linspace(0, len(stream) - length, count).astype(np.int64)
    return np.stack([stream[s : s + length] for s in starts]).astype(np.int64)
