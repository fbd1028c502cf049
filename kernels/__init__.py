"""Triton kernels on tensors only, installed as `hybrid_runtime.kernels`.

Beside each kernel stands the plain-torch reference that specifies it; it runs on CPU tensors, and
where a kernel's limits are exceeded.

- `mamba`: convolution and state update of the columns layout, and of prompts in both layouts.
- `replay`: the same for rows that decode in the replay layout, and `flush`.
- `step`: what the state manager and the speculative step launch between forward passes.
- `attention`, `moe`, `layers`, `sampling`: the rest of a model and of a step.
- `common`: what they share, among it `StateRows`, the rows of a launch.

docs/runner.md says which of them a runner calls, and with which arguments.
"""
