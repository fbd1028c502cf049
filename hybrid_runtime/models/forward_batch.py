"""What one forward pass runs on: rows of tokens, state positions, caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one forward pass over a flat token dimension.

    Tokens of row i are [cu_seqlens[i], cu_seqlens[i + 1]). Update rows (decoding, at most K + 1
    tokens each) come first, prompt rows after them.

    Attributes:
        slot: int32 [rows]; -1 = padded row: its outputs are zero, no cache is read or written.
        cu_seqlens: int32 [rows + 1].
        computed: int32 [rows], tokens already in the KV cache = position of the first token.
        max_scheduled: host upper bound of tokens per row.
        max_context: host upper bound of computed + scheduled.
        num_update_rows: how many update rows; -1 = all rows.
        num_update_tokens: tokens of the update rows; -1 = all tokens (only with all rows).
        max_update: host upper bound of tokens per update row; -1 = that of all rows.

    Raises:
        ValueError: shapes or counts contradict each other.
    """

    slot: Tensor
    cu_seqlens: Tensor
    computed: Tensor
    max_scheduled: int
    max_context: int
    num_update_rows: int = -1
    num_update_tokens: int = -1
    max_update: int = -1

    def __post_init__(self) -> None:
        rows = self.slot.shape[0]
        if self.cu_seqlens.shape != (rows + 1,):
            raise ValueError(
                f"cu_seqlens has shape {tuple(self.cu_seqlens.shape)}, must be [{rows + 1}]"
            )
        if self.computed.shape != (rows,):
            raise ValueError(f"computed has shape {tuple(self.computed.shape)}, must be [{rows}]")
        if not -1 <= self.num_update_rows <= rows:
            raise ValueError(f"num_update_rows is {self.num_update_rows}, must be in -1..{rows}")
        if 0 <= self.num_update_rows < rows and self.num_update_tokens < 0:
            raise ValueError(
                f"num_update_tokens is {self.num_update_tokens}, must be given when "
                f"num_update_rows ({self.num_update_rows}) is less than the rows ({rows})"
            )

    def parts(self, tokens: int) -> "list[BatchPart]":
        """The update rows and the prompt rows, each if there are any.

        Args:
            tokens: size of the flat token dimension.
        """
        rows = self.slot.shape[0]
        first = rows if self.num_update_rows < 0 else self.num_update_rows
        split = tokens if self.num_update_tokens < 0 else self.num_update_tokens
        bound = self.max_scheduled if self.max_update < 0 else self.max_update
        bound = min(bound, self.max_scheduled, split)
        result = []
        if first > 0 and split > 0:
            result.append(BatchPart(self, 0, first, 0, split, bound, update=True))
        if first < rows and split < tokens:
            result.append(
                BatchPart(self, first, rows, split, tokens, self.max_scheduled, update=False)
            )
        return result


@dataclass(frozen=True, slots=True)
class BatchPart:
    """Rows of one kind: [first_row, last_row), which own tokens [first_token, last_token).

    Attributes:
        batch: all rows.
        max_scheduled: host upper bound of tokens per row.
        update: update rows, otherwise prompt rows.
    """

    batch: RowBatch
    first_row: int
    last_row: int
    first_token: int
    last_token: int
    max_scheduled: int
    update: bool

    def rows(self, values: Tensor) -> Tensor:
        """The part's share of a per-row tensor."""
        return values[self.first_row : self.last_row]

    def tokens(self, values: Tensor) -> Tensor:
        """The part's share of a per-token tensor."""
        return values[self.first_token : self.last_token]

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [rows of the part + 1], counted from the part's first token."""
        starts = self.batch.cu_seqlens[self.first_row : self.last_row + 1]
        return starts - self.first_token if self.first_token else starts


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """One token per row, when a pass's results are needed of these tokens only.

    Attributes:
        index: int32 [rows], the token's place in the flat token dimension; any in padded rows.
        batch: the same tokens as rows of one token each; computed is the token's position. A row
            whose result nobody needs may be padding here (slot -1) and none in the pass.
    """

    index: Tensor
    batch: RowBatch

    def of(self, values: Tensor) -> Tensor:
        """[T, ...] to [rows, ...]."""
        return values.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class StatePositions:
    """Where the Mamba state of each row is read and written.

    Attributes:
        draft: int32 [rows], how many of the row's last tokens are drafts.
        read_column: int32 [rows], column of state_block_table[slot]; -1 = start from zeros.
        read_offset: int32 [rows], where the state starts there: so many columns further (SSM
            state), so many inputs into the conv_state (convolution).
        write_column: int32 [rows]; -1 = padded row, nothing is written.
        replay: what update rows fold and store in the replay layout; None in the columns layout.
        rounding: how update rows round their states stochastically, for every layer (its `layer`
            is not used); None rounds to nearest.
        cuts: checkpoints that prompt rows leave on the way; None: there are none.
        ring_length: tokens of a slot's ring by which `replay` was made; None: by the records' own.
    """

    draft: Tensor
    read_column: Tensor
    read_offset: Tensor
    write_column: Tensor
    replay: ReplayPositions | None = None
    rounding: Rounding | None = None
    cuts: Cuts | None = None
    ring_length: int | None = None


@dataclass(frozen=True, slots=True)
class Caches:
    """The cache memory of a model and its draft head.

    Attributes:
        kv: layer index to (k, v), each [blocks, block_size, num_key_value_heads, head_dim]; layer
            i of a draft head has index num_hidden_layers + i.
        states: layer index to (conv_states [blocks, W - 1 + K, C] with any strides,
            matrices [blocks, *]).
        kv_block_table: int32 [slots, columns] of physical blocks of kv.
        state_block_table: int32 [slots, columns] of physical blocks of states.
        records: layer index to the rings of records, [slots, *] each; empty in the columns layout.
    """

    kv: Mapping[int, tuple[Tensor, Tensor]]
    states: Mapping[int, tuple[Tensor, Tensor]]
    kv_block_table: Tensor
    state_block_table: Tensor
    records: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)


class Pass(NamedTuple):
    """A forward pass, as the layers of a model see it.

    batch: the rows.
    caches: of all layers.
    state_parts: all rows with the kernels that run them, as layers with states take them, a
        `StatePart` each; none where no layer has a state.
    """

    batch: RowBatch
    caches: Caches
    state_parts: Sequence[Any] = ()
