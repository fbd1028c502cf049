"""Warm-up passes over few layers launch whatever the whole model launches, on a stand-in of a GPU:
tensors without memory, and Triton's launcher up to the key by which it finds a compiled kernel."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from helpers.hopper import HOPPER
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from hybrid_runtime.kernels.common.varlen import Cuts
from hybrid_runtime.kernels.replay.rounding import Rounding
from hybrid_runtime.kernels.step.advance_replay import ReplayPositions
from hybrid_runtime.models import linear
from hybrid_runtime.models.few_layers import few_layers
from hybrid_runtime.models.formats import FORMATS, ROUNDED_TO, Format
from hybrid_runtime.models.forward_batch import Caches, RowBatch, StatePositions
from hybrid_runtime.models.linear import join, place
from hybrid_runtime.models.nemotron_h import NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.models.quantization import Quantization
from hybrid_runtime.models.qwen3_5 import Qwen35
from hybrid_runtime.models.qwen3_5_config import Qwen35Config

PATTERNS = [
    "M-M-M-M*-M-M-M-M-M*-M-M-",
    "M-M-M-MM-M-M-M*-M-M-M*-MM-M-",
    "MEMEM*EMEMEM*EMEMEMEM*EMEME",
    "MM*ME*-MME-*M",
    "*-*-M",
    "M",
]  # fmt: skip
ROWS = [(8, 1, 64), (8, 0, 0), (0, 16, 128), (16, 16, 1024)]
"""Decoding rows, prompts and the prompts' tokens: with products in halves and without."""
VIEWS = {
    "empty", "empty_like", "expand", "permute", "promote_types", "select", "slice",
    "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip
"""Operations of PyTorch that launch nothing."""
WIDTH, BLOCKS, SLOTS = 4, 5, 16

pytestmark = pytest.mark.skipif(
    bool(triton.knobs.runtime.interpret), reason="the interpreter compiles nothing"
)


class Launches(TorchDispatchMode):
    """Records PyTorch's operations with their shapes, and Triton's launches with all that a kernel
    is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        tensors = [part for part in given if isinstance(part, Tensor)]
        self.seen.add((str(func), *((t.shape, t.stride(), t.dtype) for t in tensors)))
        return func(*args, **(kwargs or {}))

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        options["debug"] = False
        *_, bind = kernel.device_caches[0]
        _, specialization, chosen = bind(*args, **options)
        self.seen.add((kernel.__name__, str(specialization), str(chosen)))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Tensors on it have no memory, but say that they are on a Hopper GPU."""
    alone = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: HOPPER,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", alone)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    return torch.device("meta")


def model_of(pattern: str, device: torch.device, **more: Any) -> NemotronH:
    config = NemotronHConfig(
        pattern=pattern, vocab_size=512, hidden_size=256, intermediate_size=512,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, mamba_num_heads=8,
        mamba_head_dim=64, n_groups=2, ssm_state_size=128, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128, **more,
    )  # fmt: skip
    return NemotronH(config, device, torch.bfloat16)


QWENS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"intermediate_size": 512},
    "qwen3_next": {"mlp_only_layers": [2], "intermediate_size": 512},
}


def qwen_of(kind: str, device: torch.device) -> Qwen35:
    config = {
        "model_type": kind, "num_hidden_layers": 9, "full_attention_interval": 3,
        "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **QWENS[kind],
    }  # fmt: skip
    return Qwen35(Qwen35Config.from_dict(config), device, torch.bfloat16)


def step_of(model: Any, rows: tuple[int, int, int], replays: bool) -> tuple[Any, ...]:
    """Arguments of a call of the model: some rows that decode and some that run prompts."""
    update, prompts, prompt_tokens = rows
    count, tokens = update + prompts, update * WIDTH + prompt_tokens
    device = model.device
    (group,) = model.groups
    recurrence = group.recurrence(torch.bfloat16, torch.bfloat16, "SD")

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    def some(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    ring = recurrence.allocate_records(len(group.layers), SLOTS, 7, device)
    conv_state, matrix = recurrence.checkpoint
    window = conv_state.longer(WIDTH - 1).shape
    caches = Caches(
        kv={i: (some(BLOCKS, 64, *model.kv_shape),) * 2 for i in model.kv_layers},
        states={
            i: (some(BLOCKS, *window), some(BLOCKS, *matrix.shape)) for i in model.state_layers
        },
        kv_block_table=ints(SLOTS, 8),
        state_block_table=ints(SLOTS, 8),
        records={i: tuple(part[n] for part in ring) for n, i in enumerate(group.layers)},
    )
    batch = RowBatch(
        slot=ints(count), cu_seqlens=ints(count + 1), computed=ints(count),
        max_scheduled=max(prompt_tokens, WIDTH), max_context=512, num_update_rows=update,
        num_update_tokens=update * WIDTH, max_update=WIDTH,
    )  # fmt: skip
    positions = StatePositions(
        draft=ints(count), read_column=ints(count), read_offset=ints(count),
        write_column=ints(count), cuts=Cuts(*(ints(count) for _ in Cuts._fields)),
    )  # fmt: skip
    if replays:
        replay = ReplayPositions(*(ints(count) for _ in ReplayPositions._fields))
        positions = StatePositions(
            positions.draft, positions.read_column, positions.read_offset, positions.write_column,
            replay, Rounding(ints(SLOTS), 0), positions.cuts,
        )  # fmt: skip
    return ints(tokens), batch, positions, caches


def launched(model: Any, step: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    launches = Launches()
    with monkeypatch.context() as patch, launches:
        patch.setattr(JITFunction, "run", lambda *args, **more: launches.launch(*args, **more))
        hidden = model(*step)
    assert hidden.shape == (len(step[0]), model.config.hidden_size)
    return launches.seen


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("replays", [True, False], ids=["replay", "columns"])
def test_few_layers_launch_what_all_do(
    gpu: torch.device, pattern: str, replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(pattern, gpu)
    for rows in ROWS:
        step = step_of(model, rows, replays)
        whole = launched(model, step, monkeypatch)
        with model.few_layers():
            assert launched(model, step, monkeypatch) == whole


@pytest.mark.parametrize("rounded", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("kind", QWENS)
def test_few_layers_of_qwen_launch_what_all_do(
    gpu: torch.device, kind: str, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch's own launches there are products, inputs of a router that become float32, and where
    prompts begin."""
    model, names = qwen_of(kind, gpu), set()
    model.config.rotary.frequencies(gpu)  # made once
    if rounded:
        Quantization("this", ROUNDED_TO["fp8"]).store(model, "")
        place(model, gpu)
        join(model)
    for rows in ROWS:
        step = step_of(model, rows, True)
        whole = launched(model, step, monkeypatch)
        names |= {entry[0] for entry in whole}
        with model.few_layers():
            few = launched(model, step, monkeypatch)
        assert few == whole
    assert {"_rotate_heads_kernel", "_sigmoid_gate_kernel", "_replay_update_kernel"} <= names
    assert {"prepare_kernel", "carry_kernel"} <= names
    assert rounded == ("_quantize_kernel" in names)
    torchs = {name.split(".")[1] for name in names if name.startswith("aten.")}
    assert torchs - VIEWS <= {"mm", "bmm", "_scaled_mm", "_to_copy", "sub"}


@pytest.mark.parametrize("pattern", ["MM*M*M-M", "MEM*EME*M"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_few_layers_in_8_bits(
    gpu: torch.device, pattern: str, format: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer is plain, and the scales of all attention layers but the first agree."""
    model = model_of(pattern, gpu)
    Quantization("this", format, ("*layers.0.*", "*layers.4.*.experts")).store(model, "")
    place(model, gpu)
    with monkeypatch.context() as patch:
        patch.setattr(linear, "_same_scalars", lambda parts: True)
        for layer in model.kv_layers[1:]:
            join(model.backbone.layers[layer])
    products = set()
    for rows in ROWS:
        step = step_of(model, rows, True)
        whole = launched(model, step, monkeypatch)
        products |= {entry[0] for entry in whole}
        with model.few_layers():
            assert launched(model, step, monkeypatch) == whole
    assert products >= {"_product_kernel", "aten._scaled_mm.default"}


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=12))
def test_every_kind_follows_every_one_that_it_follows_among_all(sizes: list[int]) -> None:
    few = few_layers(nn.Linear(size, 1, device="meta") for size in sizes)
    assert few == sorted(set(few))
    kinds = [sizes[index] for index in few]
    assert set(pairwise(kinds)) >= set(pairwise(sizes))
    assert (kinds[0], kinds[-1]) == (sizes[0], sizes[-1])
    assert set(kinds) == set(sizes)


def narrow(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(4, 8))


def strided(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(8, 8).t())


def misaligned(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.zeros(65)[1:].view(8, 8))


def double(layer: nn.Linear) -> None:
    layer.double()


def buffered(layer: nn.Linear) -> None:
    layer.register_buffer("scale", torch.ones(8))


def replaced(layer: nn.Linear) -> None:
    layer.__class__ = type("Other", (nn.Linear,), {})


def hidden(layer: nn.Linear) -> None:
    layer.weight.__tensor_flatten__ = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change", [narrow, strided, misaligned, double, buffered, replaced, hidden]
)
def test_a_layer_unlike_others_runs_too(change: Callable[[nn.Linear], None]) -> None:
    layers = [nn.Linear(8, 8) for _ in range(6)]
    assert few_layers(layers) == [0, 1]
    change(layers[3])
    assert few_layers(layers) == [0, 1, 3, 4]  # what follows it norms what it left


def test_layers_that_hide_what_they_are_made_of_all_run() -> None:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    for layer in layers:
        hidden(layer)
    assert few_layers(layers) == [0, 1, 2, 3]
    assert few_layers([]) == []
