"""What a state manager has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters since construction. Copies are counted when a step's results reach the host."""

    steps: int = 0
    skipped: int = 0
    candidate_rows: int = 0
    rows_copied: int = 0
    bytes_copied: int = 0
    copy_launches: int = 0
    uploads: int = 0
    readbacks: int = 0
    rows_flushed: int = 0
    flush_launches: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
