"""Tokens, lengths, drafts and sampling parameters of every slot, on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from hybrid_runtime.device.sync import Waits, allowed
from hybrid_runtime.device.transfer import Part, PinnedBuffers
from hybrid_runtime.kernels.sampling.penalties import Penalties
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.step.commit_tokens import MAX_ENDS, TextEnds
from hybrid_runtime.specdecode.logit_tables import Ban, Biases, TokenSets
from hybrid_runtime.specdecode.sampling import SamplingParams

# Words of a slot's line. The seed takes two, at an offset that suits a 64-bit integer.
_SEED, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _LENGTH, _PROMPT = 0, 2, 3, 4, 5, 6, 7
_REPETITION, _PRESENCE, _FREQUENCY, _MOST, _ENDS = 8, 9, 10, 11, 12
_DRAFTS = _ENDS + MAX_ENDS

ENDLESS = 2**31 - 1
"""`Admission.most` of a text that no length ends."""


class Admission(NamedTuple):
    """A sequence that takes a slot.

    slot: that it takes.
    tokens: known so far.
    prompt: how many of these are the prompt.
    params, seed: by which tokens are drawn.
    bans: tokens that are not.
    most, ends: tokens of the longest text, and at most `MAX_ENDS` tokens that end it. The counts
        of a step that reaches such an end are negative, and its row does not run any more.
    stops: any number of tokens more that end it, see `engine.stop_tokens`.
    """

    slot: int
    tokens: Sequence[int] | NDArray[np.int32]
    prompt: int
    params: SamplingParams
    seed: int
    bans: Sequence[Ban] = ()
    most: int = ENDLESS
    ends: Sequence[int] = ()
    stops: tuple[int, ...] = ()


class Sequences:
    """What steps take their inputs from, by slot. One line more than there are slots takes what
    rows that emit nothing would write.

    history: int32 `[slots + 1, max_length]`, prompt and emitted tokens.
    length: int32 `[slots + 1]`, how many.
    prompt_length: int32 `[slots + 1]`, how many of them are the prompt's.
    ends: where the texts end.
    drafts: int32 `[slots + 1, K]`, proposed for the next step; -1 where there is none.
    draft_probs: float32 `[slots + 1, K, V]`, what drafts were drawn from; None if none are.
    sampling: parameters, by slot.

    slots: requests that run at once.
    max_length: most tokens of one.
    num_draft: most drafts per step, K.
    vocabulary: V, tokens.
    sampled_drafts: drafts are drawn.
    steps_ahead: steps that may be queued before the first one's results are read.
    """

    def __init__(
        self,
        slots: int,
        max_length: int,
        num_draft: int,
        device: torch.device | str,
        vocabulary: int,
        sampled_drafts: bool = False,
        steps_ahead: int = 1,
    ) -> None:
        device = torch.device(device)
        self.num_draft, self.vocabulary = num_draft, vocabulary
        self._words = _DRAFTS + num_draft + num_draft % 2
        self._lines = torch.zeros((slots + 1, self._words), dtype=torch.int32, device=device)
        self.history = torch.zeros((slots + 1, max_length), dtype=torch.int32, device=device)
        floats = self._lines.view(torch.float32)
        self.length = self._lines[:, _LENGTH]
        self.prompt_length = self._lines[:, _PROMPT]
        # A buffer comes round again only after the step that it was filled for has been read.
        self._depth = steps_ahead + 2
        self._stops = TokenSets(slots, vocabulary, self._depth, device, full=False)
        self._stopped: set[int] = set()  # slots that have such a set
        self.ends = TextEnds(self._lines[:, _MOST], self._lines[:, _ENDS:_DRAFTS], self._stops.bits)
        self._lines[:, _MOST], self._lines[:, _ENDS:_DRAFTS] = ENDLESS, -1
        self.drafts = self._lines[:, _DRAFTS : _DRAFTS + num_draft]
        self.drafts.fill_(-1)
        self.sampling = SamplingTensors(
            temperature=floats[:, _TEMPERATURE],
            top_k=self._lines[:, _TOP_K],
            top_p=floats[:, _TOP_P],
            min_p=floats[:, _MIN_P],
            seed=self._lines.view(torch.int64)[:, _SEED // 2],
        )
        self.draft_probs: Tensor | None = None
        if sampled_drafts:
            shape = (slots + 1, num_draft, vocabulary)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        fields = self._words + max_length
        self._staging = PinnedBuffers(slots, fields, self._depth, device, Waits())
        self._biases: Biases | None = None
        self._allowed: TokenSets | None = None
        self._rounding_seed: Tensor | None = None

    def admit(self, entries: Sequence[Admission]) -> None:
        """Start sequences, by two copies to the device for each."""
        index, packed = self._staging.take()
        copies: list[tuple[Tensor, Part]] = []
        for i, (slot, tokens, prompt, params, seed, _, most, ends, _) in enumerate(entries):
            line, words, end = packed[i], self._words, self._words + len(tokens)
            line[_SEED : _SEED + 2].view(np.int64)[0] = seed
            line.view(np.float32)[_TEMPERATURE] = _finite(params.temperature)
            line[_TOP_K] = min(params.top_k, 2**31 - 1)  # more than any vocabulary
            line.view(np.float32)[_TOP_P] = params.top_p
            line.view(np.float32)[_MIN_P] = params.min_p
            line.view(np.float32)[_REPETITION] = params.repetition_penalty
            line.view(np.float32)[_PRESENCE] = params.presence_penalty
            line.view(np.float32)[_FREQUENCY] = params.frequency_penalty
            line[_LENGTH] = len(tokens)
            line[_PROMPT] = prompt
            line[_MOST] = most
            line[_ENDS:words] = -1  # no drafts either
            line[_ENDS : _ENDS + len(ends)] = ends
            line[words:end] = tokens
            copies.append((self._lines[slot], (i, slice(words))))
            copies.append((self.history[slot, : len(tokens)], (i, slice(words, end))))
        self._staging.copy(index, copies)

        stops = [(e.slot, e.stops or None) for e in entries if e.stops or e.slot in self._stopped]
        if stops:
            self._stops.admit(stops)
            self._stopped.update(slot for slot, tokens in stops if tokens)
            self._stopped.difference_update(slot for slot, tokens in stops if not tokens)
        if self._rounding_seed is not None:
            self._rounding_seed.copy_(self._lines[:, _SEED])
        if self._biases is None and any(e.params.logit_bias or e.bans for e in entries):
            self._biases = self._new_biases()
        if self._biases is not None:
            self._biases.admit([(e.slot, e.params.logit_bias, e.bans) for e in entries])
        if self._allowed is None and any(e.params.allowed_token_ids is not None for e in entries):
            self._allowed = self._new_allowed()
        if self._allowed is not None:
            self._allowed.admit([(e.slot, e.params.allowed_token_ids) for e in entries])

    @property
    def rounding_seed(self) -> Tensor:
        """int32 `[slots + 1]`, the low half of each seed; made when it is first needed, apart from
        the lines, since kernels take it without a stride."""
        if self._rounding_seed is None:
            with torch.inference_mode(False):  # it is changed outside of steps
                self._rounding_seed = self._lines[:, _SEED].clone()
        return self._rounding_seed

    @property
    def penalties(self) -> Penalties:
        """What changes logits, by slot, without `allowed`. The table of biases and bans is made
        when it is first needed."""
        if self._biases is None:
            self._biases = self._new_biases()
        floats = self._lines.view(torch.float32)
        return Penalties(
            history=self.history,
            prompt_length=self.prompt_length,
            repetition=floats[:, _REPETITION],
            presence=floats[:, _PRESENCE],
            frequency=floats[:, _FREQUENCY],
            bias_tokens=self._biases.bias_tokens,
            bias=self._biases.bias,
            ban_until=self._biases.ban_until,
            ban_end=self._biases.ban_end,
            ban_tokens=self._biases.ban_tokens,
            allowed=None,
        )

    @property
    def allowed(self) -> Tensor:
        """int32 `[slots + 1, words]`, `Penalties.allowed`; made when it is first needed;
        steps of requests without it do not read it."""
        if self._allowed is None:
            self._allowed = self._new_allowed()
        return self._allowed.bits

    def _new_biases(self) -> Biases:
        # They are changed outside of steps, too.
        with torch.inference_mode(False), allowed("the table of biases is made"):
            return Biases(len(self.history) - 1, self._depth, self.history.device)

    def _new_allowed(self) -> TokenSets:
        slots, device = len(self.history) - 1, self.history.device
        with torch.inference_mode(False), allowed("the table of allowed tokens is made"):
            return TokenSets(slots, self.vocabulary, self._depth, device, full=True)

    def propose(self, slot: Tensor, drafts: Tensor, probs: Tensor | None) -> None:
        """Keep what the drafter proposes for the next step.

        Of fewer than K the others are still those of earlier steps, which never hurts unless they
        were drawn: whether such a draft was accepted is in the text by now, so that verifying it
        again would change the distribution. Then they are -1.

        slot: int32 `[rows]`, -1 where there is nothing to keep.
        drafts: int32 `[rows, count]`, at most K.
        probs: float32 `[rows, count, V]`, what they were drawn from; None if they were not drawn.
        """
        at = torch.where(slot >= 0, slot, self.history.shape[0] - 1).long()
        count = drafts.shape[1]
        if self.draft_probs is not None:
            drafts = F.pad(drafts, (0, self.drafts.shape[1] - count), value=-1)
        self.drafts[:, : drafts.shape[1]].index_copy_(0, at, drafts)
        if probs is not None and self.draft_probs is not None:
            self.draft_probs[:, :count].index_copy_(0, at, probs)


def _finite(temperature: float) -> float:
    """A temperature by which float32 logits can be divided, -inf among them; beyond these ends it
    draws the likeliest token, or any."""
    return min(max(temperature, 1e-30), 1e30) if temperature else 0.0
