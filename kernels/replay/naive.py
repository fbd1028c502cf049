"""The replay layout: one live state per request and the inputs of its last step's guesses.

The live state of a request holds every token that was certain when it was last written. The
guesses of that step are not in it, their inputs stand in `WindowCache`; the next step folds the
accepted ones in (a - 1 of them) together with its own certain tokens, and writes the state once.
Here are the types, and the operation in plain torch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybrid_runtime.kernels.common.varlen import (
    gather_rows,
    physical_blocks,
    row_tokens,
    scatter_rows,
)
from hybrid_runtime.kernels.mamba.naive import _accumulator, _initial_states, _time_step


class WindowCache(NamedTuple):
    """Inputs of the guesses of each slot's last step, of one layer (or stacked, layers first).

    x `[2, slots, K, H, P]` and B `[2, slots, K, G, N]` as the update saw them, dt `[2, slots, K,
    H]` after bias, softplus and clamp. The first dimension is the turn: a step reads one half of
    a slot and writes the other, because several programs of a row read what one of them stores.
    """

    x: Tensor
    B: Tensor
    dt: Tensor

    @classmethod
    def allocate(
        cls,
        layers: int,
        slots: int,
        num_speculative_tokens: int,
        ssm_shape: tuple[int, int, int],
        groups: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> WindowCache:
        """Stacked records of all layers; `ssm_shape` is (H, P, N), `dtype` the activations'."""
        heads, dim, state = ssm_shape
        lead = (layers, 2, slots, num_speculative_tokens)
        fine = torch.promote_types(dtype, torch.float32)
        return cls(
            torch.zeros(*lead, heads, dim, dtype=dtype, device=device),
            torch.zeros(*lead, groups, state, dtype=dtype, device=device),
            torch.zeros(*lead, heads, dtype=fine, device=device),
        )

    def layer(self, index: int) -> WindowCache:
        """One layer of stacked records."""
        return WindowCache(*(part[index] for part in self))


class Replay(NamedTuple):
    """What a step does to each row's state, int32 `[rows]`.

    read_column: where the state is that the fold starts from; -1 = zero state, nothing is read
        and nothing folded.
    fold: how many recorded guesses of the row's last step were accepted, `a - 1`.
    turn: half of the records that is read, 0 or 1; this step's guesses go to the other one.
    write_column: where the state after all certain tokens goes; -1 = padded row. Usually
        `read_column`; another one after a prefix hit.
    snapshot_column: where the state after the first `snapshot_after` of the `fold + s - d` tokens
        that become part of it goes too; -1 = nowhere.
    snapshot_after: `0 .. fold + s - d`.
    """

    read_column: Tensor
    fold: Tensor
    turn: Tensor
    write_column: Tensor
    snapshot_column: Tensor
    snapshot_after: Tensor


class Rounding(NamedTuple):
    """Stochastic rounding of states narrower than fp32: equal keys give equal bytes.

    seed: int32 `[slots]`, of the request in each slot. position: int32 `[rows]`, tokens in the
    state that goes to the write column. The layer is the third part of the key, a state's element
    the fourth; slot and row are no part of it.
    """

    seed: Tensor
    position: Tensor
    layer: int


def replay_update_reference(
    x: Tensor,
    dt: Tensor,
    A_log: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    window_cache: WindowCache,
    block_table: Tensor,
    slot: Tensor,
    cu_seqlens: Tensor,
    draft: Tensor,
    replay: Replay,
    max_scheduled: int,
    rounding: Rounding | None = None,
    dt_min: float = 0.0,
    dt_max: float = math.inf,
) -> Tensor:
    """Fold what became certain into every row's state, and step the row's tokens from there.

    A row with s tokens of which d are drafts folds `fold` records and its first s - d tokens, in
    this order, and stores the state after them; its last d tokens only give outputs and go to the
    records. All states and records are read before the first one is written. A padded row and a
    row without tokens leave everything as it is.

    Args:
        x: [tokens, H, P].
        dt: [tokens, H], raw (before bias, softplus and clamp).
        A_log: [H].
        B: [tokens, G, N]; H is a multiple of G, head h uses group h // (H // G).
        C: [tokens, G, N].
        D: [H].
        dt_bias: [H].
        states: [blocks, H, P, N] in the state's own dtype, any block stride, changed in place.
        records: of this layer; its K bounds `draft` and `fold`. Changed in place.
        block_table: int32 [slots, columns] of physical blocks.
        slot: int32 [rows]; -1 = padded row.
        cu_seqlens: int32 [rows + 1].
        draft: int32 [rows].
        replay: where each row reads and writes.
        max_scheduled: upper bound of tokens per row.
        rounding: None rounds states to nearest.
        dt_min: lower clamp of dt.
        dt_max: upper clamp of dt.

    Returns:
        [tokens, H, P] in x's dtype; 0 for padded rows. Arithmetic is fp32, or fp64 when x or the
        states are.

    Raises:
        ValueError: heads are no multiple of groups, or states or records have another shape.
    """
    heads_per_group = check_shapes(x.shape[1:], B.shape[1:], states, window_cache)
    acc = _accumulator(x, states)
    certain = (cu_seqlens[1:] - cu_seqlens[:-1] - draft).long()
    active = (slot >= 0) & (replay.write_column >= 0) & (cu_seqlens[1:] > cu_seqlens[:-1])
    index, valid = row_tokens(cu_seqlens, max_scheduled, x.shape[0], active)
    zero = torch.zeros_like(slot)
    state = _initial_states(states, block_table, slot, replay.read_column, zero, active, acc)
    xs = gather_rows(x, index, valid)
    Bs = gather_rows(B, index, valid)
    Cs = gather_rows(C, index, valid).to(acc).repeat_interleave(heads_per_group, dim=2)
    step = _time_step(dt, dt_bias, index, valid, acc, dt_min, dt_max)
    fold = torch.where(active & (replay.read_column >= 0), replay.fold, 0).long()
    past = gather_window_cache(window_cache, slot, replay.turn, fold, acc)
    rate = -torch.exp(A_log.to(acc))

    def store(rows: Tensor, column: Tensor, behind: Tensor) -> None:
        """`behind`: tokens by which the live state is ahead of this one."""
        at = rows.nonzero()[:, 0]
        block = block_table[slot[at].long(), column[at].long()].long()
        key = None
        if rounding is not None:
            key = rounding_key(
                rounding.seed[slot[at].long()], rounding.layer, rounding.position[at] - behind[at]
            )
        states[block] = round_state(state[at], states.dtype, key)

    snapshot = active & (replay.snapshot_column >= 0)
    after = replay.snapshot_after.long()
    store(snapshot & (after == 0), replay.snapshot_column, fold + certain)
    for j in range(past.x.shape[1]):
        state = advance_state(state, past.x[:, j], past.B[:, j], past.dt[:, j], rate)
        here = snapshot & (after == j + 1) & (j < fold)
        store(here, replay.snapshot_column, fold + certain - j - 1)
    y = torch.zeros(xs.shape, dtype=acc, device=x.device)
    for i in range(max_scheduled):
        state = advance_state(state, xs[:, i].to(acc), Bs[:, i].to(acc), step[:, i], rate)
        y[:, i] = torch.einsum("rhpn,rhn->rhp", state, Cs[:, i])
        y[:, i] += D.to(acc)[:, None] * xs[:, i].to(acc)
        store(active & (certain == i + 1), replay.write_column, zero)
        here = snapshot & (after == fold + i + 1) & (i < certain)
        store(here, replay.snapshot_column, certain - i - 1)

    guess = valid & (torch.arange(max_scheduled, device=x.device) >= certain[:, None])
    row, token = guess.nonzero(as_tuple=True)
    at = (1 - replay.turn[row].long(), slot[row].long(), token - certain[row])
    for record, value in zip(window_cache, (xs, Bs, step), strict=True):
        record[at] = value[row, token].to(record.dtype)
    return scatter_rows(y.to(x.dtype), index, valid, x.shape[0])


def check_shapes(
    inner: torch.Size, outer: torch.Size, states: Tensor, window_cache: WindowCache
) -> int:
    """Heads per group of x `[..., H, P]` and B `[..., G, N]`; raises `ValueError` where states or
    records don't fit them."""
    (heads, dim), (groups, state) = inner, outer
    if heads % groups:
        raise ValueError(f"x has {heads} heads, must be a multiple of B's {groups} groups")
    if tuple(states.shape[1:]) != (heads, dim, state):
        raise ValueError(
            f"states is {tuple(states.shape)}, must be [blocks, {heads}, {dim}, {state}]"
        )
    lead = tuple(window_cache.x.shape[:3])
    for name, part, own in zip(
        WindowCache._fields, window_cache, ((heads, dim), (groups, state), (heads,)), strict=True
    ):
        if lead[0] != 2 or tuple(part.shape) != (*lead, *own):
            must = ", ".join(map(str, own))
            raise ValueError(
                f"records.{name} is {tuple(part.shape)}, must be [2, slots, drafts, {must}]"
            )
    return heads // groups


def check_dense(states: Tensor, window_cache: WindowCache, dtype: torch.dtype) -> None:
    """Raise `ValueError` for what the kernels cannot address: blocks of states or records that are
    not contiguous, records whose dtype is not that of the inputs (fp32 for dt)."""
    if not states[:1].is_contiguous():
        raise ValueError(f"states has strides {states.stride()}, each block must be contiguous")
    for name, part, own in zip(
        WindowCache._fields, window_cache, (dtype, dtype, torch.float32), strict=True
    ):
        if not part.is_contiguous() or part.dtype != own:
            raise ValueError(
                f"records.{name} is {part.dtype} with strides {part.stride()}, must be {own} and "
                "contiguous"
            )


def gather_window_cache(
    window_cache: WindowCache, slot: Tensor, turn: Tensor, fold: Tensor, acc: torch.dtype
) -> WindowCache:
    """x, B and dt as `[rows, K, ...]` in `acc`; from record `fold` on all are 0."""
    within = torch.arange(window_cache.dt.shape[2], device=slot.device) < fold[:, None]
    at = (torch.where(fold > 0, turn, 0).long(), torch.where(fold > 0, slot, 0).long())
    parts = []
    for record in window_cache:
        mask = within.reshape(*within.shape, *([1] * (record.dim() - 3)))
        parts.append(torch.where(mask, record[at].to(acc), torch.zeros((), dtype=acc)))
    return WindowCache(*parts)


def advance_state(state: Tensor, x: Tensor, B: Tensor, step: Tensor, rate: Tensor) -> Tensor:
    """One token: state `[rows, H, P, N]`, x `[rows, H, P]`, B `[rows, G, N]`, step `[rows, H]`."""
    B = B.repeat_interleave(x.shape[1] // B.shape[1], dim=1)
    inflow = (step[:, :, None] * x)[..., None] * B[:, :, None, :]
    return state * torch.exp(step * rate)[..., None, None] + inflow


def fold_reference(
    states: Tensor,
    window_cache: WindowCache,
    A_log: Tensor,
    block_table: Tensor,
    slot: Tensor,
    replay: Replay,
    rounding: Rounding | None = None,
) -> None:
    """Write each row's state after `replay.fold` records to its write column (-1 = leave out).

    The snapshot fields are not used. Arguments as in :func:`replay_update_reference`.
    """
    active = (slot >= 0) & (replay.write_column >= 0)
    acc = _accumulator(window_cache.x, states)
    zero = torch.zeros_like(slot)
    state = _initial_states(states, block_table, slot, replay.read_column, zero, active, acc)
    fold = torch.where(active & (replay.read_column >= 0), replay.fold, 0).long()
    past = gather_window_cache(window_cache, slot, replay.turn, fold, acc)
    for j in range(past.x.shape[1]):
        rate = -torch.exp(A_log.to(acc))
        state = advance_state(state, past.x[:, j], past.B[:, j], past.dt[:, j], rate)
    key = None
    if rounding is not None:
        seed = rounding.seed[slot.clamp(min=0).long()]
        key = rounding_key(seed, rounding.layer, rounding.position)[active]
    block = physical_blocks(block_table, slot, replay.write_column, active)
    states[block[active]] = round_state(state[active], states.dtype, key)


def rounding_key(seed: Tensor, layer: int, position: Tensor) -> Tensor:
    """int64 `[rows]` in 0 .. 2**32 - 1."""
    return _mix(_mix(_mix(seed.long() & _LOW) ^ layer) ^ (position.long() & _LOW))


def round_state(state: Tensor, dtype: torch.dtype, key: Tensor | None) -> Tensor:
    """States `[rows, H, P, N]` in `dtype`: to nearest, or up or down by chance if there is a key,
    so that the expected value is the exact one."""
    if key is None or dtype.itemsize >= 4:
        return state.to(dtype)
    element = torch.arange(math.prod(state.shape[1:]), device=state.device).view(state.shape[1:])
    chance = (_mix(element ^ key[:, None, None, None]) >> 8).float() * 2.0**-24
    digits, least = LAST_PLACE[dtype]
    power = state.float().view(torch.int32) & 0x7F800000
    unit = (power - digits).clamp(min=least)
    inverse = (254 << 23) - unit
    count = torch.floor(state.float().abs() * inverse.view(torch.float32) + chance)
    rounded = count * unit.view(torch.float32)
    return torch.where(state < 0, -rounded, rounded).to(dtype)


def _mix(bits: Tensor) -> Tensor:
    """A hash of 32 bits (Wellons, "lowbias32"), in int64."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & _LOW
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & _LOW
    return bits ^ (bits >> 16)


_LOW = 0xFFFFFFFF
LAST_PLACE = {torch.float16: (10 << 23, 103 << 23), torch.bfloat16: (7 << 23, 1 << 23)}
"""What turns the power of two of a number into its last place, in bits of fp32: how much lower it
is, and the lowest it may be (2**-24; for bfloat16 the least of fp32's normal numbers)."""
