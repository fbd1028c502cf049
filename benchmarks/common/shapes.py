"""The model shapes that are measured, with random weights made on the device.

Nemotron's are here; Qwen's are those of `hybrid-runtime bench`, and as vLLM runs them, `qwen.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import qwen
import torch
from torch import nn
from weights import fill

from hybrid_runtime.bench import shapes as qwens
from hybrid_runtime.engine.threads import use_threads
from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference
from hybrid_runtime.models.formats import FP8_PER_TENSOR, ROUNDED_TO, SCALE
from hybrid_runtime.models.linear import join, place
from hybrid_runtime.models.model import HybridModel
from hybrid_runtime.models.nemotron_h import MTPHead, NemotronH
from hybrid_runtime.models.nemotron_h_config import NemotronHConfig
from hybrid_runtime.models.quantization import Quantization
from hybrid_runtime.models.qwen3_5_config import Qwen35Config


@dataclass(frozen=True, slots=True)
class Shape:
    """`layers`: how many of the pattern's fit one GPU by default; None = all. `plain_layers`: those
    of Mamba that NVIDIA's checkpoint in FP8 keeps in 16 bits. `defaults`: options of `itl.py` that
    differ from its own."""

    name: str
    pattern: str
    config: dict[str, Any]
    mtp_pattern: str = "*"
    layers: int | None = None
    plain_layers: tuple[int, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)


QUANTIZATIONS = (*ROUNDED_TO, "modelopt")
TINY = {
    "batches": [1, 2], "isl": [24], "osl": [16], "repeats": 2,
    "block_size": 16, "max_model_len": 128, "max_tokens_per_step": 64,
}  # fmt: skip
"""Options of `itl.py` for shapes of no checkpoint that a CPU runs in seconds."""
SHAPES = {
    "8b": Shape(
        "Nemotron-H-8B",
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        {
            "hidden_size": 4096, "intermediate_size": 21504,
            "num_attention_heads": 32, "num_key_value_heads": 8,
            "mamba_num_heads": 128, "mamba_head_dim": 64,
        },
    ),
    "9b-v2": Shape(
        "Nemotron-Nano-9B-v2",
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        {
            "hidden_size": 4480, "intermediate_size": 15680,
            "num_attention_heads": 40, "num_key_value_heads": 8,
            "mamba_num_heads": 128, "mamba_head_dim": 80,
        },
    ),
    "nano-30b": Shape(
        "Nemotron-3-Nano-30B-A3B",
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        {
            "hidden_size": 2688, "moe_intermediate_size": 1856,
            "num_attention_heads": 32, "num_key_value_heads": 2,
            "mamba_num_heads": 64, "mamba_head_dim": 64,
            "n_routed_experts": 128, "num_experts_per_tok": 6,
            "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        },
        mtp_pattern="*E",
        plain_layers=(4, 11, 18, 25, 32, 41),
    ),
    "super-120b": Shape(
        "Nemotron-3-Super-120B-A12B",
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        {
            "hidden_size": 4096, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
            "num_attention_heads": 32, "num_key_value_heads": 2,
            "mamba_num_heads": 128, "mamba_head_dim": 64,
            "n_routed_experts": 512, "num_experts_per_tok": 22,
            "moe_shared_expert_intermediate_size": 5376, "routed_scaling_factor": 5.0,
        },
        mtp_pattern="*E",
        # A quarter of the depth, with a quarter of each kind of layer.
        layers=22,
    ),
    "narrow": Shape(  # of no checkpoint: many layers with small states
        "narrow, 40 Mamba layers",
        8 * "MMMMM*",
        {
            "vocab_size": 4096, "hidden_size": 512,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64,
            "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 1,
        },
    ),
    "tiny": Shape(
        "tiny",
        "M-M*ME",
        {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
            "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2,
        },
        mtp_pattern="*E",
        defaults=TINY,
    ),
}  # fmt: skip
NAMES = (*SHAPES, *qwens.SHAPES)
"""Of all shapes, as `measured` takes them."""


class Measured(NamedTuple):
    """A shape of either family, as benchmarks of whole engines take it.

    name: of `NAMES`. title: as tables call it. sizes: what runs. depth: layers of the whole model.
    defaults: options of `itl.py` that differ from its own.
    """

    name: str
    title: str
    sizes: NemotronHConfig | Qwen35Config
    depth: int
    defaults: dict[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """The sizes as JSON. Of either family `hidden_size`, and `pattern` and `mtp_pattern` with a
        letter per layer: G is Gated DeltaNet."""
        found = asdict(self.sizes)
        if isinstance(self.sizes, NemotronHConfig):
            del found["time_step_limit"]  # holds an infinity, which JSON has not
            return found
        layers = zip(self.sizes.attends, self.sizes.sparse, strict=True)
        pattern = "".join("G*"[attends] + "-E"[sparse] for attends, sparse in layers)
        head = "*E" if any(self.sizes.sparse) else "*-"
        return found | {"pattern": pattern, "mtp_pattern": head}

    @property
    def in_vllm(self) -> dict[str, Any]:
        """The sizes as `vllm/nemotron.py` takes them."""
        if isinstance(self.sizes, NemotronHConfig):
            return self.fields
        return qwen.config(self.name, self.sizes.num_hidden_layers)

    def plain_modules(self, quantization: str | None) -> list[str] | None:
        """See `plain_modules`; None where nothing is in 8 bits.

        Raises:
            ValueError: a quantization that the family is not measured in.
        """
        if quantization is None:
            return None
        if isinstance(self.sizes, NemotronHConfig):
            return plain_modules(self.sizes)
        raise ValueError(
            f"quantization is {quantization!r}; it must be left out beside vLLM with {self.name}"
        )

    def build(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        quantization: str | None = None,
        seed: int = 0,
    ) -> tuple[HybridModel, nn.Module]:
        """Model and MTP head with random weights.

        quantization: see the function `build`.

        Raises:
            ValueError: a quantization that the family is not measured in.
        """
        if isinstance(self.sizes, NemotronHConfig):
            return build(self.sizes, device, dtype, seed, quantization)
        if quantization not in (None, *ROUNDED_TO):
            known = ", ".join(ROUNDED_TO)
            raise ValueError(
                f"quantization is {quantization!r}; with {self.name} it must be of {known}"
            )
        layers = self.sizes.num_hidden_layers
        model, head = qwens.build(self.name, device, dtype, quantization, layers, seed)
        use_threads(None, model)
        return model, head


def measured(name: str, layers: int | None = None) -> Measured:
    """A shape of `NAMES`, its first `layers` layers only where that is given."""
    if name in SHAPES:
        shape = SHAPES[name]
        sizes = config(shape, layers)
        return Measured(name, shape.name, sizes, len(shape.pattern), shape.defaults)
    depth = qwens.config(name).num_hidden_layers
    title = name.replace("qwen", "Qwen").replace("b", "B").replace("-a", "-A")
    defaults = TINY if "tiny" in name else {}
    return Measured(name, title, qwens.config(name, layers), depth, defaults)


def config(shape: Shape, layers: int | None = None) -> Any:
    """The shape's `NemotronHConfig`, its first `layers` layers only where that is given."""
    pattern = shape.pattern[: layers or shape.layers]
    sizes = {"vocab_size": 131072} | shape.config
    return NemotronHConfig(
        pattern=pattern, mtp_pattern=shape.mtp_pattern, num_nextn_predict_layers=1, **sizes
    )


def plain_modules(shape: NemotronHConfig) -> list[str]:
    """What NVIDIA's FP8 checkpoints keep in 16 bits, as patterns of names: output head, draft head,
    latent projections, attention, and some layers of Mamba."""
    known = [one for one in SHAPES.values() if one.pattern.startswith(shape.pattern)]
    layers = {i for one in known for i in one.plain_layers if i < len(shape.pattern)}
    layers |= {i for i, kind in enumerate(shape.pattern) if kind == "*"}
    mixers = [f"backbone.layers.{i}.mixer.*" for i in sorted(layers)]
    return ["lm_head", "mtp*", "*latent_proj", *mixers]


def build(
    shape: NemotronHConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    quantization: str | None = None,
) -> tuple[NemotronH, MTPHead]:
    """Model and MTP head with random weights.

    quantization: of `QUANTIZATIONS`: "fp8" as of `Engine.from_pretrained`; "modelopt" as in
        NVIDIA's checkpoints, a scale per matrix and scales of inputs that are known beforehand.
    """
    if quantization is None:
        model = NemotronH(shape, device, dtype)
    else:
        model = NemotronH(shape, "meta", dtype)
        if quantization == "modelopt":
            formats = Quantization("modelopt", FP8_PER_TENSOR, tuple(plain_modules(shape)))
        else:
            formats = Quantization(quantization, ROUNDED_TO[quantization], rounded=True)
        formats.store(model, "")
        place(model, device)
    head = MTPHead(model)
    generator = torch.Generator(device).manual_seed(seed)
    for part in (model, head):
        _draw(part, shape.num_hidden_layers, generator)
    join(model)
    use_threads(None, model)
    return model.eval(), head.eval()


def _draw(module: nn.Module, depth: int, generator: torch.Generator) -> None:
    """As `randomize`; weights in 8 bits are a plain model's, rounded as a loader does it, one
    parameter after another: never are all of them there in 16 bits."""
    for name, parameter in module.named_parameters():
        matrix = module.get_submodule(name.rpartition(".")[0])
        if parameter.dtype == E4M3 and matrix.format is not FP8_PER_TENSOR:
            plain = torch.empty_like(parameter, dtype=matrix.dtype)
            fill(name, plain, depth, generator)
            values, scale = quantize_lines_reference(plain.flatten(0, -2))
            parameter.data.copy_(values.view(parameter.shape))
            matrix.weight_scale.data.copy_(scale.view(matrix.weight_scale.shape))
        elif not name.endswith(SCALE) or matrix.format is FP8_PER_TENSOR:
            fill(name, parameter.data, depth, generator)
