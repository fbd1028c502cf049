"""What a model is to the rooms above: `HybridModel`, its groups of states, and its family."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from hybrid_runtime.kernels.conv.spec import ConvLayout
from hybrid_runtime.kernels.mamba2.recurrence import mamba2
from hybrid_runtime.kernels.recurrence import Recurrence
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.tensor_files import Destination


class Mamba2Shape(NamedTuple):
    """Sizes of a Mamba-2 layer.

    heads, head_dim, state_size: of the matrix, `[heads, head_dim, state_size]`.
    groups: of heads that share B and C.
    conv_width: inputs of one output of the convolution.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    conv_width: int

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state_size

    def recurrence(
        self, dtype: torch.dtype, matrix_dtype: torch.dtype, conv_layout: ConvLayout
    ) -> Recurrence:
        """See `mamba2`."""
        return mamba2(*self, dtype, matrix_dtype, conv_layout)


class MakeRecurrence(Protocol):
    def __call__(
        self, dtype: torch.dtype, matrix_dtype: torch.dtype, conv_layout: ConvLayout
    ) -> Recurrence:
        """Of layers whose activations are of `dtype`, with states as named."""


class StateGroup(NamedTuple):
    """Layers that keep states of one kind and shape.

    recurrence: what the layers keep and how tokens change it, for the dtypes of an engine.
    layers: indices in the model, ascending: the keys of `Caches.states`.
    matrix_dtype: what the checkpoint's authors keep matrices in.
    params: what folding pending tokens into a state reads, see `Recurrence.params`; of each a
        tensor per layer.
    layouts: of states, in which there are kernels for decoding.
    """

    recurrence: MakeRecurrence
    layers: tuple[int, ...]
    matrix_dtype: torch.dtype
    params: tuple[tuple[Tensor, ...], ...]
    layouts: tuple[str, ...] = ("replay", "columns")


class HybridModel(Protocol):
    """What engine, draft heads and speculative decoding need of a target.

    vocab_size, hidden_size: of logits and hidden states.
    num_layers: draft heads number their layers from there on.
    max_positions: tokens of the longest text that it was made for; None: it does not say.
    eos_token_ids: tokens that end a text, by its config.
    kv_layers: indices of the layers with keys and values, the keys of `Caches.kv`.
    kv_shape: (num_key_value_heads, head_dim) of one cached key.
    kv_dtype: what the checkpoint's authors keep keys and values in; None: `dtype`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int | None
    eos_token_ids: tuple[int, ...]
    kv_layers: tuple[int, ...]
    kv_shape: tuple[int, int]
    kv_dtype: torch.dtype | None

    @property
    def groups(self) -> tuple[StateGroup, ...]:
        """The layers with states."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""

    @property
    def dtype(self) -> torch.dtype:
        """Of matrices and activations."""

    @property
    def output_weight(self) -> Tensor:
        """`[vocab_size, hidden_size]`: logits are products with it."""

    def __call__(
        self, tokens: Tensor, batch: RowBatch, positions: StatePositions, caches: Caches
    ) -> Tensor:
        """int `[T]` to hidden states `[T, hidden_size]` after the final norm; caches are updated.

        tokens: rows one after another; tokens outside all rows need valid ids too.
        positions: where the rows' states lie.
        """

    def embed(self, tokens: Tensor) -> Tensor:
        """int `[T]` to `[T, hidden_size]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """`[T, hidden_size]` after the final norm to `[T, vocab_size]`."""

    def few_layers(self) -> AbstractContextManager[None]:
        """Within it a call runs few layers, which together launch every kernel that all of them
        launch over as many rows and tokens. What it returns has the shape of hidden states, but
        means nothing."""


class ModelConfig(Protocol):
    """What a checkpoint's loader needs of a config.json before there is a model.

    eos_token_id: tokens that end a text.
    dtype: the checkpoint's own, by name; None: it does not say.
    has_draft_head: whether the checkpoint brings a draft head of the family.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str | None: ...

    @property
    def has_draft_head(self) -> bool: ...


class Family(NamedTuple):
    """What a `model_type` of config.json stands for.

    read_config: decoded config.json to the family's config; `ValueError` names the field that is
        wrong.
    build: config, device and dtype to a model without values.
    tensors: model or draft head, and the names in a checkpoint's files, to the places of its
        tensors by the names that they have in such files.
    build_head: target to the draft head that is in its checkpoint, without values; `ValueError` if
        the config names none. None: the family has none.
    head_prefix: what the names of the head's tensors begin with.
    others: what the names of tensors begin with that are neither the model's nor the head's: those
        of an encoder of images, which are left out.
    formats: whether matrices may be of other formats than plain numbers; then modules are called in
        checkpoints as in the model.
    """

    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    build: Callable[[Any, torch.device | str, torch.dtype], HybridModel]
    tensors: Callable[[Any, Collection[str]], Mapping[str, Destination]]
    build_head: Callable[[Any], nn.Module] | None = None
    head_prefix: str = ""
    others: tuple[str, ...] = ()
    formats: bool = False
