"""Our state handling inside vLLM, as a plug-in: installing this package next to vLLM is all.

What one needs to know to do the same in another runner. vLLM's V2 runner keeps the exact counts on
the device: tokens computed, tokens accepted and the running column of each request. Its own forward
pass reads them, so `HybridStateManager`, which keeps such counts itself, would hold them twice and
pay a launch in every step for that. The adapter therefore stands on what lies under the manager:

- `bounds` follows, per request, the interval in which the exact count must lie, and lets
  `state.align` say which rows may have a state to move (no readback, nothing waits);
- `decide` settles those rows, and no others, on the device, and leaves vLLM's counts exactly as
  vLLM's own kernels would have, so that any step can be handed back to them;
- `kernels.state_move` moves the states of the rows that act.

`binding` finds vLLM's state tensors and block tables, `mover` uploads and launches, `state` hangs
all of it into vLLM's model state, `models` and `plugin` bring that class in, `versions` knows what
differs between releases and which configurations are left to vLLM, `check` compares every byte
with vLLM's kernels, `counters` writes to vLLM's log.
"""

from hybrid_runtime.integrations.vllm.plugin import register

__all__ = ["register"]
