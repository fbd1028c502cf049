"""Triton kernels on tensors only, installed as `hybrid_runtime.kernels`.

Beside each kernel is the plain-torch reference that specifies it; it runs on CPU tensors, and
where a kernel's limits are exceeded.

- `recurrence`: what state manager and engine know of a recurrence, as data and functions.
- `mamba2`: the one there is: prompts, decoding rows of either layout, and `flush`.
- `conv`: the causal convolution before it, which other recurrences share.
- `replay`: what every recurrence with a ring of records shares: ring, rows, rounding.
- `step`: what the state manager and the speculative step launch between forward passes.
- `attention`, `moe`, `layers`, `sampling`: the rest of a model and of a step.
- `common`: what they share, among it `StateRows`, the rows of a launch.

docs/runner.md says which of them a runner calls, and with which arguments.
"""
