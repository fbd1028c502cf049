"""The runner against the reference step: the same random numbers give the same tokens, whatever the
number of drafts of each row and step, and whether steps are padded and captured or not."""

from collections.abc import Callable, Sequence
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
    true_states,
    true_token,
)
from torch import Tensor

from hybrid_runtime.kernels.sampling.naive import probabilities_reference, sample_reference
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.models.forward_batch import Caches
from hybrid_runtime.specdecode import reference
from hybrid_runtime.specdecode.acceptance import Acceptance, Adjusted, greedy, rejection
from hybrid_runtime.specdecode.draft_length import Drafts
from hybrid_runtime.specdecode.drafter import VerifyOutput
from hybrid_runtime.specdecode.runner import SpecDecodeRunner
from hybrid_runtime.specdecode.sampling import (
    DRAFT,
    SamplingParams,
    uniform,
)
from hybrid_runtime.specdecode.sequences import Admission, Sequences
from hybrid_runtime.specdecode.shape import StepShape, most_rows
from hybrid_runtime.state.layout import LayoutKind, StateLayout
from hybrid_runtime.state.manager import HybridStateManager
from hybrid_runtime.state.rows import StepRows
from hybrid_runtime.state.step import Step

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

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
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
        return drafts[:, :count], probs[:, :count] if self.drawn else None


class Runs:
    """A runner over memory of which every request owns its share; nothing is scheduled.

    num_draft: most drafts of a row. captured: steps are padded, and captured as far as they can be.
    """

    def __init__(
        self,
        kind: LayoutKind,
        drawn: bool,
        params: Sequence[SamplingParams],
        num_draft: int = K,
        captured: bool = False,
    ) -> None:
        slots, target, self.params = len(PROMPTS), SoftTarget(), params
        layout = StateLayout(target.rule.recurrence, num_draft, BLOCK, kind)
        columns = MAX_LENGTH // BLOCK + num_draft + 1
        tables = torch.arange(slots * columns, dtype=torch.int32).view(slots, columns)
        states = {layer: layout.allocate(slots * columns, "cpu") for layer in STATE_LAYERS}
        records = layout.allocate_records(len(STATE_LAYERS), slots, "cpu")
        rows = most_rows(slots) if captured else None
        self.manager = HybridStateManager(
            layout, slots, num_draft, "cpu", readback=False, max_rows=rows
        )
        self.manager.bind(states, tables)
        keys = torch.zeros(slots * columns, BLOCK, 1, 1)
        caches = Caches(
            kv={KV_LAYER: (keys, keys.clone())},
            states=states,
            kv_block_table=tables,
            state_block_table=tables,
            records={
                layer: tuple(part[i] for part in records)
                for i, layer in enumerate(STATE_LAYERS)
                if records
            },
        )
        sequences = Sequences(slots, MAX_LENGTH + 1, num_draft, "cpu", VOCABULARY, drawn)
        self.runner = SpecDecodeRunner(
            target,
            self.manager,
            sequences,
            caches,
            SoftDrafter(drawn) if num_draft else None,
            MAX_LENGTH,
            captured_prompt_tokens=MAX_LENGTH if captured else None,
        )
        self.computed = dict.fromkeys(range(slots), 0)
        self.last: Step | None = None

    def admit(self, slot: int) -> None:
        self.manager.admit(slot)
        self.runner.sequences.admit(
            [Admission(slot, PROMPTS[slot], len(PROMPTS[slot]), self.params[slot], 100 + slot)]
        )

    def step(
        self, num_draft: dict[int, int], accept: Acceptance, propose: int | None = None
    ) -> dict[int, list[int]]:
        """What each slot emits with so many drafts; those whose prompts have not run yet run
        them. propose: as of `SpecDecodeRunner.step`."""
        slots = sorted(num_draft, key=lambda slot: self.computed[slot] == 0)
        decodes = [self.computed[slot] > 0 for slot in slots]
        drafts = [num_draft[slot] if d else 0 for slot, d in zip(slots, decodes, strict=True)]
        certain = [1 if d else len(PROMPTS[slot]) for slot, d in zip(slots, decodes, strict=True)]
        rows = StepRows.exact(
            slots, [self.computed[slot] for slot in slots], np.add(certain, drafts), drafts
        )
        shape = StepShape.of(rows, sum(decodes))
        self.last = step = self.runner.step(rows, shape, accept, propose=propose)
        emitted = self.runner.read(step, "test").tolist()
        for slot, one, row in zip(slots, certain, emitted, strict=True):
            self.computed[slot] += one + row[-1] - 1
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
            states=tuple(true_states((*state.tokens, token))),
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
    num_draft: Sequence[int],
) -> list[list[int]]:
    """What the first steps of a request emit, with so many drafts each."""
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
    for drafts in num_draft:
        emitted, state = reference.speculative_step(
            target=target,
            drafter=drafter,
            state=state,
            token=token,
            num_draft=drafts,
            accept=reference.rejection if drawn else reference.matching,
            random=partial(random, len(state.tokens) + 1),
        )
        steps.append(emitted)
        token = emitted[-1]
    return steps


def held_against_the_reference(
    runs: Runs, accept: Acceptance, drawn: bool, drafts: Callable[[int, int], int]
) -> set[int]:
    """Run steps with `drafts(number of the step, slot)` drafts; how many tokens they emitted."""
    found: dict[int, list[list[int]]] = {slot: [] for slot in range(len(PROMPTS))}
    planned: dict[int, list[int]] = {slot: [] for slot in found}
    order = np.random.default_rng(0)
    for number in range(STEPS):
        # The last request comes later: its prompt runs beside rows that decode.
        live = range(len(PROMPTS) - (number < 2))
        for slot in live:
            if number in (0, 2) and not found[slot]:
                runs.admit(slot)
        num_draft = {slot: drafts(number, slot) for slot in order.permutation(live).tolist()}
        for slot, tokens in runs.step(num_draft, accept).items():
            planned[slot].append(num_draft[slot] if found[slot] else 0)
            found[slot].append(tokens)
    for slot, steps in found.items():
        sampling = runs.runner.sequences.sampling.select(torch.tensor([slot]))
        assert steps == reference_steps(PROMPTS[slot], sampling, drawn, planned[slot])
    return {len(tokens) for steps in found.values() for tokens in steps[1:]}


KINDS = pytest.mark.parametrize("kind", ["columns", "replay"])
CAPTURED = pytest.mark.parametrize("captured", [False, True], ids=["as they are", "captured"])
ACCEPTANCES = pytest.mark.parametrize(
    ("params", "accept", "drawn"),
    [
        ([COLD] * 3, greedy, False),
        ([COLD, WARM, HOT], rejection, False),
        ([COLD, WARM, HOT], rejection, True),
    ],
    ids=["greedy", "chosen drafts", "drawn drafts"],
)


@CAPTURED
@KINDS
@ACCEPTANCES
@pytest.mark.parametrize(
    "drafts",
    [
        lambda number, slot: K,
        lambda number, slot: (K, 0, 1)[number % 3],
        lambda number, slot: (number + slot) % (K + 1),
    ],
    ids=["K drafts", "K, 0 and 1 in turn", "rows that differ"],
)
def test_steps_emit_what_the_reference_does(
    kind: LayoutKind,
    params: list[SamplingParams],
    accept: Acceptance,
    drawn: bool,
    captured: bool,
    drafts: Callable[[int, int], int],
) -> None:
    runs = Runs(kind, drawn, params, captured=captured)
    runs.runner.capture([accept])
    assert {1, K + 1} <= held_against_the_reference(runs, accept, drawn, drafts)


@CAPTURED
def test_a_drawn_draft_is_verified_once(captured: bool) -> None:
    """By the text one can tell whether it was accepted: of fewer drafts than a step verifies the
    others are none, and not those of an earlier step."""
    runs = Runs("replay", True, [HOT] * 3, captured=captured)
    slots, proposed = range(len(PROMPTS)), [0, *[K, 1, 0] * 4]
    for slot in slots:
        runs.admit(slot)
    steps = [runs.step(dict.fromkeys(slots, K), rejection, count) for count in proposed[1:]]
    for slot in slots:
        sampling = runs.runner.sequences.sampling.select(torch.tensor([slot]))
        found = [step[slot] for step in steps]
        assert found == reference_steps(PROMPTS[slot], sampling, True, proposed[:-1])


@CAPTURED
@KINDS
def test_plain_decoding_emits_what_the_reference_does(kind: LayoutKind, captured: bool) -> None:
    runs = Runs(kind, False, [COLD, WARM, HOT], num_draft=0, captured=captured)
    runs.runner.capture([rejection])
    assert held_against_the_reference(runs, rejection, False, lambda number, slot: 0) == {1}


@CAPTURED
def test_log_probabilities_come_with_any_number_of_drafts(captured: bool) -> None:
    runs = Runs("replay", False, [COLD] * 3, captured=captured)
    accept = Adjusted(
        rejection, runs.runner.sequences, penalises=False, allows=False, wants_logprobs=True
    )
    texts = [list(prompt) for prompt in PROMPTS]
    for slot in range(3):
        runs.admit(slot)
    for num_draft in ({0: 0, 1: 0}, {0: K, 1: K, 2: 0}, {0: 0, 1: 0}, {0: 1, 1: 2}, {0: 1, 1: 1}):
        slots = sorted(num_draft, key=lambda slot: runs.computed[slot] == 0)
        emitted = runs.step(num_draft, accept)
        assert runs.last is not None
        values = runs.runner.read_logprobs(runs.last, "test")[..., 0].view(np.float32)
        assert len(values) == len(slots)
        assert max(runs.last.rows.draft) < values.shape[1] <= K + 1
        for row, slot in zip(values, slots, strict=True):
            for value, token in zip(row, emitted[slot], strict=False):
                wanted = LOGITS[true_token(tuple(texts[slot]))].log_softmax(-1)[token]
                assert value == pytest.approx(float(wanted), abs=1e-5)
                texts[slot].append(token)


def test_what_is_captured() -> None:
    """Ahead, every shape with K drafts a row; then shapes without prompts as they come. Rows that
    differ in drafts need none."""
    runs = Runs("replay", False, [COLD] * 3, captured=True)
    runs.runner.capture([greedy, rejection])
    captured = runs.runner._captured
    assert captured is not None
    decoding, mixed = captured.shapes.decoding(), list(captured.shapes.mixed())
    assert {shape for shape, _ in captured._frames} == {*decoding, *mixed}
    graphs = captured._graphs._captured
    # With each acceptance: verified and accepted; with prompts, only accepted.
    assert len(graphs) == len(decoding) * (2 + 1) + len(mixed) * (1 + 2 + 1)
    for slot in range(3):
        runs.admit(slot)
    runs.step({0: 0, 1: 0}, greedy)
    ahead = set(graphs)
    for num_draft in ({0: 1, 1: 2}, {0: K, 1: K}, {0: 0, 2: 0}, {0: 2, 1: 1}):
        runs.step(num_draft, greedy)
        assert set(graphs) == ahead
    runs.step({0: 1, 1: 1, 2: 1}, greedy)
    key = StepShape.decoding(3, Drafts.alike(1)), greedy
    assert set(graphs) - ahead == {("verify_and_accept", key), ("draft", (*key, K))}


def test_costs_are_those_of_different_tokens() -> None:
    """A model with experts reads the weights of few of them for many tokens that are alike."""
    runs = Runs("replay", False, [COLD] * 3, captured=True)
    captured = runs.runner._captured
    assert captured is not None
    for shape in captured.shapes.decoding():
        frame = captured.frame(shape, greedy, K)
        captured._prepare(frame)
        captured._spread_tokens(frame)
        tokens = frame.inputs.tokens.tolist()
        assert len({*tokens}) == len(tokens) == shape.tokens
        assert {0} <= {*tokens} <= {*range(VOCABULARY)}


def test_a_kind_of_acceptance_that_comes_late_takes_no_others_graph() -> None:
    runs = Runs("replay", False, [COLD] * 3, captured=True)
    runs.runner.capture([greedy])
    for slot in range(3):
        runs.admit(slot)
    runs.step({0: 0, 1: 0}, rejection)
    captured = runs.runner._captured
    assert captured is not None
    mixed = {key: frame for key, frame in captured._frames.items() if key[0].prompt_rows and key[1]}
    assert {accept for _, accept in mixed} == {greedy, rejection}
    for key, frame in mixed.items():
        assert frame.graph_of("accept") == ("accept", key)
