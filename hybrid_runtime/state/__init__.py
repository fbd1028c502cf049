"""The state manager: everything about align mode, nothing about models."""

from hybrid_runtime.device.sync import allowed, sync_guard
from hybrid_runtime.state.align import can_skip_mamba_postprocess
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.layouts.flush import Foldable
from hybrid_runtime.state.manager import HybridStateManager, Strategy
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Snapshot, Step

__all__ = [
    "Foldable",
    "HybridStateManager",
    "Snapshot",
    "StateLayout",
    "Stats",
    "Step",
    "StepRows",
    "Strategy",
    "allowed",
    "can_skip_mamba_postprocess",
    "sync_guard",
]
