"""What one forward pass runs on (moved: the step loop, one floor below, makes these)."""

from hybrid_runtime.specdecode.batch import BatchPart, Caches, RowBatch, StatePositions

__all__ = ["BatchPart", "Caches", "RowBatch", "StatePositions"]
