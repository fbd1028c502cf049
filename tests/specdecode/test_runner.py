"""The runner against the reference step: the same random numbers give the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from helpers.hash_target import (
    KV_LAYER,
    STATE_LAYERS,
    VOCABULARY,
    WINDOW,
    HashTarget,
    attended,
    chosen,
    rolled,
    true_token,
)
from torch import Tensor

from hybrid_runtime.kernels.sampling.naive import probabilities_reference, sample_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.specdecode import reference
from hybrid_runtime.specdecode.acceptance import Acceptance, greedy, rejection
from hybrid_runtime.specdecode.drafter import VerifyOutput
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.specdecode.sampling import (
    DRAFT,
    SamplingParams,
    uniform,
)
from hybrid_runtime.specdecode.sequences import Sequences
from hybrid_runtime.state.layout import LayoutKind, StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows

K, BLOCK, MAX_LENGTH, STEPS = 3, 8, 64, 12
_GENERATOR = torch.Generator().manual_seed(0)
# What follows, by the token that `HashTarget` would choose; the drafter knows it more or less.
LOGITS = 4 * torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR)
DRAFT_LOGITS = LOGITS + torch.randn(VOCABULARY, VOCABULARY, generator=_GENERATOR)

COLD = SamplingParams()
WARM = SamplingParams(temperature=0.8, top_k=40, top_p=0.95)
HOT = SamplingParams(temperature=1.5)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8], [9]]


class SoftTarget(HashTarget):
    """`HashTarget` with a distribution for each token that it would choose."""

    def logits(self, hidden: Tensor) -> Tensor:
        return LOGITS[hidden[:, 0].long()]


def draft_probs(tokens: Sequence[int], sampling: SamplingTensors) -> Tensor:
    """What the drafter makes of these tokens: float32 `[V]`."""
    return probabilities_reference(DRAFT_LOGITS[true_token(tuple(tokens))][None, None], sampling)[
        0, 0
    ]


class SoftDrafter:
    """Draws drafts, or takes the most likely ones."""

    def __init__(self, drawn: bool) -> None:
        self.drawn = drawn

    def propose(self, output: VerifyOutput) -> tuple[Tensor, Tensor | None]:
        rows = output.draft_inputs.slot.shape[0]
        drafts = torch.full((rows, K), -1, dtype=torch.int32)
        probs = torch.zeros(rows, K, VOCABULARY)
        for row, slot in enumerate(output.draft_inputs.slot.tolist()):
            if slot < 0:
                continue
            length = int(output.sequences.length[slot])
            tokens = output.sequences.history[slot, :length].tolist()
            sampling = output.sequences.sampling.select(torch.tensor([slot]))
            for i in range(K):
                probs[row, i] = q = draft_probs(tokens, sampling)
                u = uniform(sampling.seed, torch.tensor([length + i]), DRAFT)
                drafts[row, i] = sample_reference(q[None], u)[0] if self.drawn else q.argmax()
                tokens.append(int(drafts[row, i]))
        return drafts, probs if self.drawn else None


class Runs:
    """A runner over memory of which every request owns its share; nothing is scheduled."""

    def __init__(self, kind: LayoutKind, drawn: bool, params: Sequence[SamplingParams]) -> None:
        slots, target, self.params = len(PROMPTS), SoftTarget(), params
        layout = StateLayout.from_config(target.config, K, block_size=BLOCK, kind=kind)
        columns = MAX_LENGTH // BLOCK + K + 1
        tables = torch.arange(slots * columns, dtype=torch.int32).view(slots, columns)
        states = {layer: layout.allocate(slots * columns, "cpu") for layer in STATE_LAYERS}
        window_cache = layout.allocate_window_cache(
            len(STATE_LAYERS), slots, 1, torch.float32, torch.device("cpu")
        )
        self.manager = HybridStateManager(layout, slots, K, "cpu", readback=False)
        self.manager.bind(states, tables)
        keys = torch.zeros(slots * columns, BLOCK, 1, 1)
        caches = Caches(
            kv={KV_LAYER: (keys, keys.clone())},
            states=states,
            kv_block_table=tables,
            state_block_table=tables,
            window_cache={}
            if window_cache is None
            else {layer: window_cache.layer(i) for i, layer in enumerate(STATE_LAYERS)},
        )
        sequences = Sequences(slots, MAX_LENGTH + 1, K, "cpu", VOCABULARY, drawn)
        self.runner = SpecDecodeRunner(
            target, self.manager, sequences, caches, SoftDrafter(drawn), MAX_LENGTH
        )
        self.computed = dict.fromkeys(range(slots), 0)

    def admit(self, slot: int) -> None:
        self.manager.admit(slot)
        self.runner.sequences.admit(
            [(slot, PROMPTS[slot], len(PROMPTS[slot]), self.params[slot], 100 + slot, ())]
        )

    def step(self, slots: Sequence[int], accept: Acceptance) -> dict[int, list[int]]:
        """What each slot emits; those whose prompts have not run yet run them."""
        slots = sorted(slots, key=lambda slot: self.computed[slot] == 0)
        decodes = [self.computed[slot] > 0 for slot in slots]
        rows = StepRows.exact(
            slots,
            [self.computed[slot] for slot in slots],
            [K + 1 if d else len(PROMPTS[slot]) for slot, d in zip(slots, decodes, strict=True)],
            [K if d else 0 for d in decodes],
        )
        step = self.runner.step(rows, sum(decodes), accept)
        emitted = self.runner.read(step, "test").tolist()
        for slot, scheduled, draft, row in zip(
            slots, rows.scheduled.tolist(), rows.draft.tolist(), emitted, strict=True
        ):
            self.computed[slot] += scheduled - draft + row[-1] - 1
        return {slot: row[: row[-1]] for slot, row in zip(slots, emitted, strict=True)}


FIRST_STATES = tuple(1 + layer for layer in STATE_LAYERS)


class Memory(NamedTuple):
    """What `HashTarget` keeps in its caches."""

    states: tuple[int, ...] = FIRST_STATES
    window: tuple[int, ...] = (0,) * WINDOW
    tokens: tuple[int, ...] = ()


class ReferenceTarget:
    """`SoftTarget` token by token."""

    def __init__(self, sampling: SamplingTensors) -> None:
        self.sampling = sampling

    def advance(self, state: Memory, token: int) -> Memory:
        return Memory(
            states=tuple(rolled(value, token) for value in state.states),
            window=(*state.window[1:], token + 1),
            tokens=(*state.tokens, token),
        )

    def probs(self, state: Memory) -> Tensor:
        context = attended(state.tokens, range(len(state.tokens)))
        logits = LOGITS[chosen(state.states, state.window, context)]
        return probabilities_reference(logits[None, None], self.sampling)[0, 0]


def reference_steps(
    prompt: Sequence[int],
    sampling: SamplingTensors,
    drawn: bool,
    count: int,
) -> list[list[int]]:
    """What the first `count` steps of a request emit."""
    target = ReferenceTarget(sampling)

    def drafter(state: Memory, follow: Sequence[int]) -> Tensor:
        q = draft_probs([*state.tokens, *follow], sampling)
        return q if drawn else torch.eye(VOCABULARY)[q.argmax()]

    def random(length: int, stream: int, index: int) -> float:
        return uniform(sampling.seed, torch.tensor([length + index]), stream).item()

    state, token = Memory(), prompt[-1]
    for read in prompt[:-1]:
        state = target.advance(state, read)
    steps: list[list[int]] = []
    for _ in range(count):
        emitted, state = reference.speculative_step(
            target=target,
            drafter=drafter,
            state=state,
            token=token,
            num_draft=K if steps else 0,  # there are no drafts beside a prompt
            accept=reference.rejection if drawn else reference.matching,
            random=partial(random, len(state.tokens) + 1),
        )
        steps.append(emitted)
        token = emitted[-1]
    return steps


@pytest.mark.parametrize("kind", ["columns", "replay"])
@pytest.mark.parametrize(
    ("params", "accept", "drawn"),
    [
        ([COLD] * 3, greedy, False),
        ([COLD, WARM, HOT], rejection, False),
        ([COLD, WARM, HOT], rejection, True),
    ],
    ids=["greedy", "chosen drafts", "drawn drafts"],
)
def test_steps_emit_what_the_reference_does(
    kind: LayoutKind, params: list[SamplingParams], accept: Acceptance, drawn: bool
) -> None:
    runs = Runs(kind, drawn, params)
    found: dict[int, list[list[int]]] = {slot: [] for slot in range(len(PROMPTS))}
    order = np.random.default_rng(0)
    for number in range(STEPS):
        # The last request comes later: its prompt runs beside rows that decode.
        live = range(len(PROMPTS) - (number < 2))
        for slot in live:
            if number in (0, 2) and not found[slot]:
                runs.admit(slot)
        for slot, tokens in runs.step(order.permutation(live).tolist(), accept).items():
            found[slot].append(tokens)
    lengths = set()
    for slot, steps in found.items():
        sampling = runs.runner.sequences.sampling.select(torch.tensor([slot]))
        assert steps == reference_steps(PROMPTS[slot], sampling, drawn, len(steps))
        lengths |= {len(tokens) for tokens in steps[1:]}
    assert lengths == set(range(1, K + 2))
