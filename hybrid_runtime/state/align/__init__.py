"""Align mode: a state for every draft that may be accepted, each in a column of its own, as engines
have it whose kernels know nothing of replay."""

from hybrid_runtime.state.align.arithmetic import can_skip_mamba_postprocess

__all__ = ["can_skip_mamba_postprocess"]
