"""Mamba state for hybrid language models: prefix caching and speculative decoding together, without
waiting for the GPU.

Where to begin:

- `hybrid_runtime.state`: the state manager, for a model runner of your own (docs/runner.md).
- `hybrid_runtime.engine`: an engine for Nemotron-H and Qwen3.5 checkpoints (docs/engine.md).
- `hybrid_runtime.integrations.vllm`: the vLLM plug-in, which vLLM finds by itself (docs/vllm.md).
- `hybrid_runtime.kernels`: the kernels, on tensors only; `hybrid_runtime.specdecode`: one
  speculative step.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("hybrid-runtime")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "unknown"
