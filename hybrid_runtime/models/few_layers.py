"""Few of a model's layers that launch every kernel that all of them launch, for warm-up passes."""

from collections.abc import Hashable, Iterable
from itertools import chain, pairwise

from torch import nn


def few_layers(layers: Iterable[nn.Module]) -> list[int]:
    """Indices, ascending, of layers that do for all of them.

    A layer's launches follow from its kind, from what the layer before left for its norm to add
    (nothing before the first one), and from the numbers of rows and tokens. Every pair of kinds
    that are neighbours in the model are neighbours here; the first and the last kind are the same,
    and so is what the final norm adds. Not seen: slices of stacked caches that are aligned
    differently from layer to layer, which takes state or head sizes that 8 does not divide.
    """
    kinds = [layer_kind(layer) for layer in layers]
    chosen = [0] if kinds else []
    seen = set()
    for index, pair in enumerate(pairwise(kinds), start=1):
        if pair in seen:
            continue
        seen.add(pair)
        if kinds[chosen[-1]] != pair[0]:
            chosen.append(index - 1)
        chosen.append(index)
    if chosen and kinds[chosen[-1]] != kinds[-1]:
        chosen.append(len(kinds) - 1)
    return chosen


def layer_kind(layer: nn.Module) -> Hashable:
    """Equal for layers that launch the same kernels: of the same modules, over tensors that agree
    in all that products and kernels are chosen by. A layer whose tensors hide what they are made of
    (quantised ones) is a kind of its own."""
    modules = tuple((name, type(m), m.extra_repr()) for name, m in layer.named_modules())
    tensors = []
    for name, tensor in chain(layer.named_parameters(), layer.named_buffers()):
        if hasattr(tensor, "__tensor_flatten__"):
            return layer
        # Allocations are aligned to more than 16 bytes, which is what kernels are compiled for.
        within = tensor.storage_offset() * tensor.element_size() % 16
        tensors.append((name, type(tensor), tensor.shape, tensor.stride(), tensor.dtype, within))
    return modules, tuple(tensors)
