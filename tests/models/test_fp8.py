"""Checkpoints in 8 bits against transformers' model with the weights and inputs that they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modelopt import KV_SCALES, MATRIX, as_quantised, kind_of, write_fp8
from helpers.oracle import (
    hf_model,
    make_caches,
    our_model,
    random_config,
    run_prompt,
    save_checkpoint,
)
from helpers.toy_family import toy_checkpoint
from torch import Tensor

from hybrid_runtime.demo import PROMPTS, SHIPPED
from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.checkpoint import Checkpoint, load_model
from hybrid_runtime.models.formats import FORMATS, FP8_PER_TENSOR, PLAIN, Format
from hybrid_runtime.models.linear import Experts, Linear, checkpoint_tensors, matrices
from hybrid_runtime.models.quantization import Quantization, _read

__all__ = ["toy_checkpoint"]  # a fixture

PER_CHANNEL = "FP8_PER_CHANNEL_PER_TOKEN"
ATTENTION = "backbone.layers.3.mixer"
TABLE = {"*.0.*": "FP8", "*.q_proj": "FP8", "*.[13].*": PER_CHANNEL}
BIASES = {"use_bias": True, "mlp_bias": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "beside": ("M-M*", {}, {}),
    "config": ("M-M*", BIASES, {"form": "config"}),
    "nested": ("M-M*", {}, {"form": "nested", "kv_scales": KV_SCALES}),
    "both": ("M-M*", {}, {"form": "both", "excluded": [f"{ATTENTION}.*"]}),
    "keys and values": ("*M*", {}, {"excluded": ["*[qkvo]_proj"], "kv_scales": KV_SCALES}),
    "excluded in part": ("M-M*", {}, {"excluded": [f"{ATTENTION}.k_proj", "*layers.0.*"]}),
    "scales of their own": ("M-M*", {}, {"apart": True, "kv_scales": KV_SCALES}),
    "lines": ("M-M*", BIASES, {"algorithms": PER_CHANNEL, "form": "config"}),
    "table": ("M-M*", {}, {"algorithms": TABLE}),
    "experts": ("MEM*", {}, {"form": "config"}),
    "routed experts": ("MEM*", {}, {"form": "config", "experts": True}),
    "routed experts, lines": ("MEM*", {}, {"experts": True, "algorithms": PER_CHANNEL}),
    "of one layer": ("MEE", {}, {"experts": True, "excluded": ["*layers.1.mixer.experts*"]}),
    "latent": ("ME", {"moe_latent_size": 24}, {"experts": True, "excluded": ["*latent_proj"]}),
    "table of experts": (
        "MEE*", {}, {"experts": True, "algorithms": {"*s.1.m*": "FP8", "*s.2.m*": PER_CHANNEL}},
    ),
}  # fmt: skip


def scales(hf: Any, tokens: Tensor) -> dict[str, float]:
    """By the kind of a matrix: of its inputs, with the largest tenth of them cut off."""
    found: dict[str, float] = {}

    def see(name: str) -> Any:
        def hook(_: Any, given: Any) -> None:
            found[name] = max(found.get(name, 0), float(given[0].abs().amax()) * 0.9 / 448)

        return hook

    names = {name.replace("model.", "backbone.", 1): name for name, _ in hf.named_modules()}
    hooks = [
        hf.get_submodule(theirs).register_forward_pre_hook(see(kind_of(name)))
        for name, theirs in names.items()
        if MATRIX.fullmatch(name)
    ]
    hf(tokens[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over largest logit."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def logits(model: Any, tokens: Tensor, chunks: list[int], update: bool = False) -> Tensor:
    caches = make_caches(
        model, slots=2, block_size=16, max_tokens=len(tokens), kv_dtype=model.kv_dtype
    )
    hidden = run_prompt(model, tokens, chunks, caches, 16, slot=1, update=update)
    found: Tensor = model.logits(hidden)
    return found


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_are_those_of_what_the_checkpoint_means(case: str, tmp_path: Path) -> None:
    """An input that lies between two numbers of 8 bits may fall to the other one, which is no fault
    and moves logits by a thousandth: some of the texts do not have one, none has many."""
    pattern, changes, options = CASES[case]
    config = random_config(pattern, **changes)
    found, plain = [], []
    for seed in range(4):
        directory = tmp_path / str(seed)
        hf, tokens = hf_model(config, seed), torch.randint(0, config["vocab_size"], (17,))
        ours = our_model(config, hf)
        save_checkpoint(directory, config, ours)
        without = logits(ours, tokens, [17])
        quantised = write_fp8(directory, scales(hf, tokens), **options)
        assert quantised
        as_quantised(hf, directory, quantised)
        want = hf(tokens[None], use_cache=False).logits[0]
        checkpoint = Checkpoint(directory)
        model: Any = load_model(checkpoint, "cpu", torch.float32)
        formats = {name: format.algorithm for name, format in formats_of(model).items()}
        assert {name: one for name, one in formats.items() if one != "none"} == quantised
        assert model.kv_dtype == (E4M3 if options.get("kv_scales") else None)
        found.append([
            distance(logits(model, tokens, chunks, update), want)
            for chunks, update in (([17], False), ([5, 12], False), ([1] * 17, True))
        ])  # fmt: skip
        plain.append(distance(without, want))
    assert min(plain) > 0.05  # what would be found without rounding inputs and weights
    assert max(map(max, found)) < 0.1
    for each in zip(*found, strict=True):
        assert min(each) < 1e-5


def formats_of(model: Any) -> dict[str, Format]:
    """By the names of matrices in a checkpoint."""
    formats = {name: matrix.format for name, matrix in matrices(model).items()}
    for name, part in model.named_modules():
        if isinstance(part, Experts):
            for which, matrix in part.named_children():
                names = [f"{name}.{i}.{which}" for i in range(part.count)]
                formats |= dict.fromkeys(names, matrix.format)
    return formats


def saved(directory: Path, pattern: str = "M-M*", **options: Any) -> Checkpoint:
    config = random_config(pattern)
    save_checkpoint(directory, config, our_model(config, hf_model(config, 0)))
    if options:
        write_fp8(directory, dict.fromkeys(("in", "out", "up", "down", "q", "o"), 0.01), **options)
    return Checkpoint(directory, None if options else "fp8")


@pytest.mark.parametrize(
    "options", [{"experts": True}, {"experts": True, "algorithms": PER_CHANNEL}, {}], ids=str
)
def test_bytes_are_known_before_memory_is_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    checkpoint = saved(tmp_path, "M-ME*", **options)
    planned = checkpoint.tensors(checkpoint.build("meta", torch.bfloat16)).nbytes
    model: Any = load_model(checkpoint, "cpu", torch.bfloat16)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in model.parameters()}
    assert planned == sum(storage.nbytes() for storage in storages.values())
    narrow = checkpoint_tensors(model)
    assert {narrow[f"{name}.weight"].dtype for name in formats_of(model)} == {E4M3}
    assert model.dtype == torch.bfloat16
    assert model.output_weight.dtype == torch.bfloat16


def test_weights_are_rounded_by_lines(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, "M-ME*")
    model: Any = load_model(checkpoint, "cpu", torch.float32)
    rounded = checkpoint_tensors(model)
    plain = checkpoint_tensors(load_model(Checkpoint(tmp_path), "cpu", torch.float32))
    for name in formats_of(model):
        values, scale = quantize_lines_reference(plain.pop(f"{name}.weight"))
        weight = rounded.pop(f"{name}.weight")
        assert torch.equal(weight.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(rounded.pop(f"{name}.weight_scale"), scale)
    assert rounded.keys() == plain.keys()
    for name, tensor in rounded.items():
        assert torch.equal(tensor, plain[name])


def test_experts_share_the_largest_scale_of_their_inputs(tmp_path: Path) -> None:
    """Before the first product; between the two each has its own."""
    model: Any = load_model(saved(tmp_path, "ME", experts=True), "cpu", torch.float32)
    experts = model.backbone.layers[1].mixer.experts
    own = torch.tensor([0.01 * (1, 1.25, 0.75)[i % 3] for i in range(experts.count)])
    torch.testing.assert_close(experts.up_proj.input_scale.data, torch.full_like(own, 0.0125))
    torch.testing.assert_close(experts.down_proj.input_scale.data, own)


@pytest.mark.parametrize(
    ("apart", "algorithms", "products"),
    [
        (False, "FP8", 1),
        (True, "FP8", 3),
        (True, PER_CHANNEL, 1),
        (False, {"*.[kv]_proj": "FP8"}, 3),
    ],
)
@torch.inference_mode()
def test_neighbours_share_a_product_if_they_can(
    tmp_path: Path, apart: bool, algorithms: Any, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each names what it reads, and none reads beyond its own lines."""
    model: Any = load_model(
        saved(tmp_path, apart=apart, algorithms=algorithms), "cpu", torch.float32
    )
    merged, x = model.backbone.layers[3].mixer._qkv, torch.randn(5, 32)
    read = []
    for format in {part.format for part in merged.parts.values()}:
        plainly = type(format).product

        def counted(self: Any, matrix: Any, x: Tensor, plainly: Any = plainly) -> Tensor:
            read.append(matrix.weight.shape[0])
            return plainly(self, matrix, x)

        monkeypatch.setattr(type(format), "product", counted)
    found = merged(x)
    assert len(read) == products
    assert sum(read) == 64
    for part, y in zip(merged.parts.values(), found, strict=True):
        torch.testing.assert_close(y, part(x))
    k, v = merged(x, "k_proj", "v_proj")
    assert torch.equal(torch.cat([k, v]), torch.cat(found[1:]))


QUERY = "backbone.layers.14.mixer.q_proj"


@pytest.mark.parametrize(
    ("pattern", "covers"),
    [
        (QUERY, True),
        ("backbone.layers.14.mixer", True),
        ("backbone.layers.14", True),
        ("model.layers.14.mixer.q_proj", True),
        ("model.layers.backbone.layers.14*", True),
        ("model.backbone.layers.14.mixer.q_proj", True),
        ("language_model.model.layers.14.mixer.*", True),
        ("layers.14.mixer.*_proj", True),
        ("*.14.mixer.[qkv]_proj", True),
        ("*q_proj*", True),
        ("backbone*", True),
        ("*", True),
        ("backbone.layers.1", False),
        ("backbone.layers.1.mixer.q_proj", False),
        ("backbone.layers.1.*", False),
        ("mtp.layers.14.mixer.q_proj", False),
        ("mtp*", False),
        ("q_proj", False),
        ("layers.14.mixer.Q_proj", False),
        ("lm_head", False),
        ("", False),
    ],
)
def test_excluded_names(pattern: str, covers: bool) -> None:
    said = Quantization("this", FP8_PER_TENSOR, (pattern,))
    assert said.format_of(QUERY) is (PLAIN if covers else FP8_PER_TENSOR)


def test_tables_name_matrices_however_they_begin() -> None:
    for name in (QUERY, "model.layers.14.mixer.q_proj", "layers.14.mixer.q_proj"):
        about = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {name: {"quant_algo": "FP8"}}}
        said = _read("this", about)
        assert said.format_of(QUERY) is FP8_PER_TENSOR
        assert said.format_of(QUERY.replace("14", "1")) is PLAIN


def test_a_family_of_plain_numbers_only(toy_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="'fp8': models of this family have plain weights only"):
        Checkpoint(toy_checkpoint, "fp8")


@torch.inference_mode()
def test_the_shipped_checkpoint_s_logits_in_8_bits() -> None:
    """Off by 2 % of their norm, where bfloat16 is off by 0.4 %; surprise at a text by 0.5 %."""
    tokens = torch.tensor(list("".join(PROMPTS).encode()))
    exact, rounded = (
        logits(load_model(Checkpoint(SHIPPED, way), "cpu", torch.float32), tokens, [len(tokens)])
        for way in (None, "fp8")
    )
    assert (rounded - exact).norm() < 0.04 * exact.norm()
    surprise = [
        -x.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).mean() for x in (exact, rounded)
    ]
    assert abs(surprise[1] - surprise[0]) < 0.03 * surprise[0]


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("tokens", [1, 17, 64, 65, 300])
@pytest.mark.parametrize("outputs", [256, 902])
@torch.inference_mode()
def test_products_on_a_gpu(format: Any, tokens: int, outputs: int) -> None:
    linear = Linear(512, outputs, "cuda", torch.bfloat16, halves=True)
    linear.store_as(format, "cuda")
    values, scale = quantize_lines_reference(torch.randn(outputs, 512, device="cuda"))
    linear.weight.copy_(values)
    linear.weight_scale.copy_(scale if linear.weight_scale.dim() else scale.mean())
    if format is FP8_PER_TENSOR:
        linear.input_scale.fill_(0.008)
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    found = linear(x)
    assert found.dtype == torch.bfloat16
    beside = Linear(512, outputs, "cpu", torch.bfloat16)
    beside.store_as(format, "cpu")
    for name in linear.stored():
        getattr(beside, name).copy_(getattr(linear, name))
    want = beside(x.cpu()).float()
    total = found.float().sum(0) if found.dim() == 3 else found.float()
    assert (total.cpu() - want).norm() < 8e-3 * want.norm()
