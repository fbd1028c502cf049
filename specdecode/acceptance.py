"""Which drafts are accepted, and the one token that the target adds; without host waits.

Row i brings ``num_draft[i] <= K`` drafts and the target's logits at K + 1 positions:
``logits[i, j]`` is the target's distribution after the row's certain tokens and its first j drafts.
K is that of the step here: the most drafts of any row. A draft of -1 inside ``num_draft`` is one
that the drafter did not make; it is never accepted.
Rows with few drafts need fewer logits: they may also come as lines ``[lines, V]``, with the line of
each row's positions beside them.
``reference.py`` has the same in the paper's order, for one request.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from hybrid_runtime.kernels.sampling.accept import accept_drafts, drafted, emit, num_leading
from hybrid_runtime.kernels.sampling.argmax import argmax
from hybrid_runtime.kernels.sampling.logprobs import token_logprobs
from hybrid_runtime.kernels.sampling.naive import sample_reference
from hybrid_runtime.kernels.sampling.penalties import penalise
from hybrid_runtime.kernels.sampling.probabilities import select_with_probabilities
from hybrid_runtime.kernels.sampling.rows import SamplingTensors
from hybrid_runtime.kernels.sampling.select import select_tokens
from hybrid_runtime.specdecode.sampling import ACCEPT, MAX_LOGPROBS, SYNTHETIC, TARGET, uniform
from hybrid_runtime.specdecode.sequences import Sequences


@dataclass(frozen=True, slots=True)
class Accepted:
    """Tokens that a step emits.

    Attributes:
        tokens: int32 [rows, K + 1]: accepted drafts, then the target's own token, then -1. Where
            logits of the target were NaN or infinite, -1 minus their count is its own token.
        num_accepted: int32 [rows]: emitted tokens, 1 .. num_draft + 1; 0 where the row emits none.
        logprobs: int32 [rows, K + 1, 1 + 2 * most], as of ``token_logprobs``; None if not wanted.
    """

    tokens: Tensor
    num_accepted: Tensor
    logprobs: Tensor | None = None


class Acceptance(Protocol):
    """How the runner calls any of them; ``greedy`` and ``rejection`` fit as they are.

    Args:
        logits: float [rows, K + 1, V]; with ``verify`` [lines, V].
        drafts: int32 [rows, K].
        num_draft: int32 [rows], 0 .. K.
        emits: bool or int [rows]; 0 for a padded row or an unfinished prefill chunk.
        draft_probs: float32 [rows, K, V], the distributions q the drafts were drawn from with
            random numbers of stream DRAFT (or independent ones); None: they were not drawn.
        sampling: parameters of the rows; temperature 0 gives exactly what ``greedy`` gives.
        position: int [rows], absolute position of the first token the row emits.
        verify: int32 [rows, K + 1], the line of each logits[i, j]; behind the row's drafts that of
            the last one. None: logits are by row.

    Raises:
        ValueError: shapes that do not fit.
    """

    def __call__(
        self,
        logits: Tensor,
        drafts: Tensor,
        num_draft: Tensor,
        emits: Tensor,
        draft_probs: Tensor | None,
        sampling: SamplingTensors,
        position: Tensor,
        verify: Tensor | None = None,
    ) -> Accepted: ...


def greedy(
    logits: Tensor,
    drafts: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    draft_probs: Tensor | None = None,
    sampling: SamplingTensors | None = None,
    position: Tensor | None = None,
    verify: Tensor | None = None,
) -> Accepted:
    """Accepts drafts as long as each is the target's most likely token (lowest id at ties).

    Arguments and errors are those of ``Acceptance``; those by default None are not used, but
    ``verify``.
    """
    _check(logits, drafts, num_draft, emits, verify)
    return Accepted(*accept_drafts(_most_likely(logits, verify), drafts, num_draft, emits))


def rejection(
    logits: Tensor,
    drafts: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    draft_probs: Tensor | None,
    sampling: SamplingTensors,
    position: Tensor,
    verify: Tensor | None = None,
) -> Accepted:
    """Keeps the target's distribution, whatever the drafts (Leviathan et al. 2023, 2211.17192).

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced
    by a token from norm(max(0, p - q)), or from p where that is zero everywhere; the bonus token
    after the last draft is drawn from p. p is the target's distribution after temperature, top-k,
    top-p and min-p.

    Drafts that were not drawn (``draft_probs`` None, q one-hot) have a simpler form with the same
    distribution: a token is drawn from p, and the draft is accepted if it is that token. The text
    of a seed is then the same with and without drafts.

    Arguments and errors are those of ``Acceptance``.
    """
    _check(logits, drafts, num_draft, emits, verify)
    rows, max_draft, vocabulary = *drafts.shape, logits.shape[-1]
    if draft_probs is not None and draft_probs.shape != (rows, max_draft, vocabulary):
        raise ValueError(
            f"draft_probs has shape {list(draft_probs.shape)}, "
            f"must be None or [{rows}, {max_draft}, {vocabulary}]"
        )
    if draft_probs is None or max_draft == 0:
        if verify is None:
            chosen = select_tokens(logits, sampling, position, TARGET, num_draft, emits, marks=True)
        else:
            chosen = _select_lines(logits, sampling, position, num_draft, emits, verify)
        return Accepted(*accept_drafts(chosen, drafts, num_draft, emits))

    logits = by_row(logits, verify)
    chosen, target = select_with_probabilities(logits, sampling, position, TARGET, marks=True)
    seed, position = sampling.seeds(), position.long()
    positions = position[:, None] + torch.arange(max_draft, device=logits.device)
    made = drafted(drafts, num_draft)
    token = drafts.clamp(min=0).long()[..., None]
    p = target[:, :max_draft].gather(-1, token)[..., 0]
    q = draft_probs.gather(-1, token)[..., 0]
    u = uniform(seed, positions, ACCEPT)
    accepted = num_leading(made & (u * q < p))

    # After the last draft nothing is subtracted: the bonus token is drawn from p itself.
    next_draft = accepted.clamp(max=max_draft - 1)
    rejected = (accepted < max_draft)[:, None] & made.gather(1, next_draft[:, None])
    target = _at_position(target, accepted)
    residual = torch.where(
        rejected, (target - _at_position(draft_probs, next_draft)).clamp(min=0), target
    )
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target)
    own = sample_reference(residual, uniform(seed, position + accepted, TARGET))
    broken = chosen.gather(1, accepted[:, None])[:, 0]
    own = torch.where(broken < 0, broken, own)
    return Accepted(*emit(drafts, accepted, own, emits))


def synthetic(
    logits: Tensor,
    drafts: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    rates: Tensor,
    position: Tensor,
    seed: Tensor,
    verify: Tensor | None = None,
) -> Accepted:
    """Accepts as many drafts as ``rates`` says, right or wrong; for measurements.

    The token after them is the target's most likely one at that position. One random number
    (stream SYNTHETIC) per row and step decides: at least i + 1 drafts are accepted with probability
    ``rates[i]``, in rows that have that many. rates: float32 [rows, K], not increasing. seed: int64
    [rows]. Other arguments and errors are those of ``Acceptance``; position is int64.
    """
    _check(logits, drafts, num_draft, emits, verify)
    if rates.shape != drafts.shape:
        raise ValueError(f"rates has shape {list(rates.shape)}, must be {list(drafts.shape)}")
    chosen, drawn = _most_likely(logits, verify), uniform(seed, position, SYNTHETIC)
    return Accepted(*accept_drafts(chosen, drafts, num_draft, emits, rates, drawn))


def synthetic_rates(mean_length: float, num_draft: int) -> tuple[float, ...]:
    """Rates for ``synthetic`` with a mean of ``mean_length`` emitted tokens per step.

    Lengths vary as little as possible: leading drafts are always accepted, one more with the
    probability that is left. 2.5 with 3 drafts gives (1, 0.5, 0). The mean is 1 + sum(rates), the
    target's own token included, as with ``synthetic_acceptance_length`` in vLLM.

    Raises:
        ValueError: ``mean_length`` outside [1, num_draft + 1] or ``num_draft`` negative.
    """
    if num_draft < 0:
        raise ValueError(f"num_draft is {num_draft}, must be at least 0")
    if not 1 <= mean_length <= num_draft + 1:
        raise ValueError(f"mean_length is {mean_length}, must be in [1, {num_draft + 1}]")
    return tuple(min(max(mean_length - 1.0 - i, 0.0), 1.0) for i in range(num_draft))


def synthetic_acceptance(
    kinds: Sequence[Sequence[float]], device: torch.device | str
) -> Acceptance:
    """``synthetic`` with the requests' own seeds, as the runner calls it. kinds: rates, fixed ones;
    a request has those at its seed, modulo their number.

    Raises:
        ValueError: a rate outside [0, 1] or larger than the one before it.
    """
    for rates in kinds:
        if not all(0 <= rate <= 1 for rate in rates):
            raise ValueError(f"rates is {list(rates)}, must be probabilities in [0, 1]")
        if any(later > earlier for earlier, later in pairwise(rates)):
            raise ValueError(f"rates is {list(rates)}, must not increase")
    on_device = torch.tensor(kinds, dtype=torch.float32, device=device)

    def accept(
        logits: Tensor,
        drafts: Tensor,
        num_draft: Tensor,
        emits: Tensor,
        draft_probs: Tensor | None,
        sampling: SamplingTensors,
        position: Tensor,
        verify: Tensor | None = None,
    ) -> Accepted:
        seed = sampling.seeds()
        own = on_device[seed % len(kinds)] if len(kinds) > 1 else on_device.expand(len(seed), -1)
        own = own[:, : drafts.shape[1]]
        return synthetic(logits, drafts, num_draft, emits, own, position.long(), seed, verify)

    return accept


class Adjusted:
    """An acceptance by other logits, or with log-probabilities; an ``Acceptance`` itself.

    Attributes:
        accept: accepts drafts by the changed logits.
        sequences: text, penalties, biases and bans, by slot.
        penalises: change the logits by penalties, biases and bans.
        allows: some rows may draw some tokens only (with ``penalises``).
        wants_logprobs: of what is emitted, by the logits as the model gives them.
    """

    def __init__(
        self,
        accept: Acceptance,
        sequences: Sequences,
        penalises: bool,
        allows: bool,
        wants_logprobs: bool,
    ) -> None:
        self.accept, self.sequences = accept, sequences
        self.penalises, self.allows, self.wants_logprobs = penalises, allows, wants_logprobs

    def __call__(
        self,
        logits: Tensor,
        drafts: Tensor,
        num_draft: Tensor,
        emits: Tensor,
        draft_probs: Tensor | None,
        sampling: SamplingTensors,
        position: Tensor,
        verify: Tensor | None = None,
    ) -> Accepted:
        adjusted = logits = by_row(logits, verify)
        if self.penalises:
            assert sampling.slot is not None
            penalties = self.sequences.penalties
            if self.allows:
                penalties = penalties._replace(allowed=self.sequences.allowed)
            adjusted = penalise(logits, penalties, sampling.slot, position, drafts)
        accepted = self.accept(adjusted, drafts, num_draft, emits, draft_probs, sampling, position)
        if not self.wants_logprobs:
            return accepted
        most = min(MAX_LOGPROBS, logits.shape[-1])
        return replace(accepted, logprobs=token_logprobs(logits, accepted.tokens, most))


def by_row(logits: Tensor, verify: Tensor | None) -> Tensor:
    """[rows, K + 1, V], copied where they are lines."""
    if verify is None:
        return logits
    return logits.index_select(0, verify.flatten()).unflatten(0, verify.shape)


def _check(
    logits: Tensor, drafts: Tensor, num_draft: Tensor, emits: Tensor, verify: Tensor | None
) -> None:
    if verify is None and (logits.dim() != 3 or logits.shape[1] == 0):
        raise ValueError(f"logits has shape {list(logits.shape)}, must be [rows, K + 1, V]")
    if verify is not None and (logits.dim() != 2 or verify.dim() != 2 or not verify.shape[1]):
        raise ValueError(
            f"logits has shape {list(logits.shape)} and verify {list(verify.shape)}, must be "
            "[lines, V] and [rows, K + 1]"
        )
    rows, num_positions = (logits if verify is None else verify).shape[:2]
    if drafts.shape != (rows, num_positions - 1):
        raise ValueError(
            f"drafts has shape {list(drafts.shape)}, must be [{rows}, {num_positions - 1}]"
        )
    for name, value in (("num_draft", num_draft), ("emits", emits)):
        if value.shape != (rows,):
            raise ValueError(f"{name} has shape {list(value.shape)}, must be [{rows}]")


def _most_likely(logits: Tensor, verify: Tensor | None) -> Tensor:
    """int32 [rows, K + 1], the lowest token at ties; marked where logits are broken."""
    if verify is None:
        return argmax(logits.flatten(0, 1), marks=True).view(logits.shape[:2])
    return argmax(logits, marks=True)[verify]


def _select_lines(
    logits: Tensor,
    sampling: SamplingTensors,
    position: Tensor,
    num_draft: Tensor,
    emits: Tensor,
    verify: Tensor,
) -> Tensor:
    """What each row's positions draw, int32 [rows, K + 1]: every line is drawn from as if it were
    a row of one token, at its own position. Lines of no row are taken for the first row's."""
    rows, width = verify.shape
    at, shape = verify.flatten().long(), (logits.shape[0],)
    ahead = torch.minimum(torch.arange(width, device=at.device), num_draft[:, None]).flatten()
    row = torch.arange(rows, device=at.device)[:, None].expand(-1, width).flatten()
    row, ahead = (x.new_zeros(shape).scatter_(0, at, x) for x in (row, ahead))
    own = sampling.of(row if sampling.slot is None else sampling.slot[row])
    drawn = select_tokens(
        logits[:, None], own, position[row] + ahead, TARGET, torch.zeros_like(row), emits[row],
        marks=True,
    )  # fmt: skip
    return drawn[:, 0][verify]


def _at_position(x: Tensor, index: Tensor) -> Tensor:
    """``x[i, index[i]]`` of [rows, n, V]: [rows, V]."""
    return x.gather(1, index[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]
