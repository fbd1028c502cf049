"""A small real engine around the state manager: requests, blocks, scheduler, step by step."""

from hybrid_runtime.engine.async_engine import AsyncEngine
from hybrid_runtime.engine.client import Delta
from hybrid_runtime.engine.config import EngineConfig
from hybrid_runtime.engine.engine import Engine, QueueFull
from hybrid_runtime.engine.logprobs import TokenLogprobs
from hybrid_runtime.engine.owner import EngineClosed
from hybrid_runtime.engine.request import BrokenLogits, Completion, Request
from hybrid_runtime.engine.stats import EngineStats
from hybrid_runtime.specdecode.sampling import SamplingParams

__all__ = [
    "AsyncEngine",
    "BrokenLogits",
    "Completion",
    "Delta",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "QueueFull",
    "Request",
    "SamplingParams",
    "TokenLogprobs",
]
