"""The state manager: states over time, and nothing about models."""

from hybrid_runtime.device.sync import allowed, sync_guard
from hybrid_runtime.state.align.arithmetic import can_skip_mamba_postprocess
from hybrid_runtime.state.checks import Strategy
from hybrid_runtime.state.layout import StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.placement import BlockDemand
from hybrid_runtime.state.replay.flush import FlushInputs
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.stats import Stats
from hybrid_runtime.state.step import Checkpoint, Step, StepPositions

__all__ = [
    "BlockDemand",
    "Checkpoint",
    "FlushInputs",
    "HybridStateManager",
    "StateLayout",
    "Stats",
    "Step",
    "StepPositions",
    "StepRows",
    "Strategy",
    "allowed",
    "can_skip_mamba_postprocess",
    "sync_guard",
]
