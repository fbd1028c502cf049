"""What a state manager has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Counters since construction.

    steps, skipped: steps begun, and those in which no counts could make a state be copied.
    candidate_rows: rows in which some count could.
    rows_copied, bytes_copied: rows in which a state was copied (columns layout) or a checkpoint
        stored at the cost of a write (replay layout; prompts' cuts are not counted), counted when a
        step's results are known.
    copy_launches: launches of the pre-copy and the post-copy.
    uploads, readbacks: packed lines sent to the device, and accepted counts sent to the host.
    rows_flushed, flush_launches: of `flush`.
    lost_checkpoints: rows that passed a wanted position (columns: a retained boundary) without
        leaving a checkpoint, as prompt chunks may: a prefix hit there is not possible.
    waits, wait_seconds: of the host for the device.
    """

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
    lost_checkpoints: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
