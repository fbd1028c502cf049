"""Our state handling inside vLLM, as a plug-in: installing this package next to vLLM is all.

What one needs to know to do the same in another runner. vLLM's V2 runner keeps the exact counts on
the device: tokens computed, tokens accepted and the running column of each request. Its own forward
pass reads them. `HybridStateManager` keeps such counts itself; it would hold them twice and launch
a kernel in every step for that. So the adapter stands on what lies under the manager:

- `bounds` follows, per request, the interval in which the exact count must lie, and asks
  `state.align` which rows may have a state to move (nothing is read back, nothing waits);
- `kernels.step.vllm_decide` decides for those rows, and no others, on the device, moves the states
  of the rows that act, and leaves vLLM's counts exactly as vLLM's own kernels would, so that any
  step can be handed back to them.

The other files: `binding` finds vLLM's state tensors and block tables; `mover` uploads and
launches; `state` hooks both into vLLM's model state; `models` and `plugin` bring that class in;
`config` is the switch and what is said to the user; `versions` knows how releases differ and which
configurations are left to vLLM; `hooks` which calls are known; `checker` compares
every byte with vLLM's kernels; `counters` writes to vLLM's log.

Replay, one state per request instead of one per guess, is `mixer` (vLLM's layer with our state
update), `replay_layers` (what the layers share), `replay_state` and `replay_mover` (the model state
with other moves for the same candidates) and `spec` (the cache's manager in old releases).
"""

from hybrid_runtime.integrations.vllm.plugin import register

__all__ = ["register"]
