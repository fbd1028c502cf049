"""Our state handling inside vLLM, as a plug-in: installed next to vLLM, it is found by itself.

vLLM's V2 runner keeps the exact counts on the device: the tokens computed and accepted, and the
running column, of each request. Its own forward pass reads them. `HybridStateManager` would keep
the same counts a second time and launch a kernel in every step to update them. So the adapter uses
what lies below the manager; it is the example to follow in any runner that owns its counts:

- `bounds` keeps, per request, the interval in which the exact count lies, and asks `state.align`
  which rows may have a state to move. Nothing is read back, nothing waits.
- `kernels.step.vllm_decide` decides for those rows on the device, moves the states of the rows
  that act, and leaves vLLM's counts exactly as vLLM's own kernels would, so that any step can be
  handed back to them.

The other files, vLLM's layout first, then replay:

- `models`: the entry point, and the model classes that bring our model state into vLLM
- `state`: the model state, which hooks `bounds` and `mover` into vLLM's steps
- `mover`: finds vLLM's states, uploads the candidates of a step and launches for them
- `checker`: check mode, every byte beside vLLM's own kernels
- `replay_layers`, `replay_state`, `replay_checker`: layers, model state and check mode of replay
- `mamba2_layers`, `gdn_layers`: what is different in each kind of layer that replays
- `spec`: the cache manager that replay needs in vLLM 0.25 and 0.26
- `config`: the switch, and what is said to the user
- `versions`: how releases differ, and which configurations are left to vLLM
- `hooks`: which calls and fields of vLLM the adapter knows
"""

from hybrid_runtime.integrations.vllm.models import register

__all__ = ["register"]
