"""Checkpoints in 8 bits as ModelOpt writes them, made of plain ones, and what transformers' model
computes with them."""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference

MODEL, BESIDE = "model.safetensors", "hf_quant_config.json"
MATRIX = re.compile(
    r"backbone\.layers\.\d+\.mixer\.(?:shared_experts\.|experts\.(\d+)\.)?"
    r"(in|out|up|down|q|k|v|o)_proj"
)
EXPERTS = "*mixer.experts*"
KV_SCALES = {"k_scale": 0.004, "v_scale": 0.003}
"""Of the small random models: their largest keys and values are cut off."""
Form = Literal["beside", "config", "nested", "both"]


def kind_of(name: str) -> str:
    """Of a matrix: what its input is."""
    found = MATRIX.fullmatch(name)
    assert found
    return {"k": "q", "v": "q"}.get(found[2], found[2])


def expert_of(name: str) -> int | None:
    """Of a matrix: which routed expert's it is."""
    found = MATRIX.fullmatch(name)
    return int(found[1]) if found and found[1] else None


def write_config(directory: Path, form: Form, about: Mapping[str, Any]) -> None:
    """Say in one of the forms, or in two of them, how weights are quantised."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    if form != "config" and form != "nested":
        beside = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": about}
        (directory / BESIDE).write_text(json.dumps(beside))
    if form != "beside":
        flat = dict(about)
        flat["ignore"] = flat.pop("exclude_modules", [])
        if flat.pop("kv_cache_quant_algo", None):
            flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
        if flat["quant_algo"] == "FP8":
            group = {"dynamic": False, "num_bits": 8, "type": "float"}
            flat["config_groups"] = {"group_0": {"input_activations": group, "weights": group}}
        method = {"quant_method": "modelopt", "producer": {"name": "modelopt"}}
        given = {"quantization": about} if form == "nested" else flat
        file.write_text(json.dumps(config | {"quantization_config": given | method}))


def write_fp8(
    directory: Path,
    input_scales: Mapping[str, float],
    form: Form = "beside",
    algorithms: str | Mapping[str, str] = "FP8",
    excluded: Sequence[str] = (),
    kv_scales: Mapping[str, float] | None = None,
    apart: bool = False,
    experts: bool = False,
) -> dict[str, str]:
    """Turn a plain checkpoint into one in 8 bits.

    Args:
        input_scales: by the kind of a matrix.
        algorithms: of all matrices, or by patterns of their names: a table.
        excluded: patterns of matrices that stay plain.
        kv_scales: of keys and values of all attention layers, by their names.
        apart: q, k and v have scales of their own, else the largest of the three.
        experts: routed experts are in 8 bits too, each with scales of its own.

    Returns:
        The algorithm by the name of a matrix that is quantised.
    """
    tensors = load_file(directory / MODEL)
    modules = [n.removesuffix(".weight") for n in tensors if n.endswith("_proj.weight")]
    largest = {name: float(tensors[f"{name}.weight"].abs().amax()) for name in modules}
    quantised: dict[str, str] = {}
    for name in filter(MATRIX.fullmatch, modules):
        if kv_scales and kind_of(name) == "q" and name[-6] != "q":
            scale_name = f"{name[-6]}_scale"
            tensors[f"{name}.{scale_name}"] = torch.tensor([kv_scales[scale_name]])
        if any(fnmatchcase(name, pattern) for pattern in excluded):
            continue
        expert = expert_of(name)
        if expert is not None and not experts:
            continue
        given = {"*": algorithms} if isinstance(algorithms, str) else algorithms
        found = [algorithm for pattern, algorithm in given.items() if fnmatchcase(name, pattern)]
        if not found:
            continue
        quantised[name], weight = found[0], tensors[f"{name}.weight"].float()
        if found[0] == "FP8":
            merged = name[-6:] in ("q_proj", "k_proj", "v_proj")
            sharing = (
                [f"{name[:-6]}{one}_proj" for one in "qkv"] if merged and not apart else [name]
            )
            amax = max(largest[one] for one in sharing)
            scale, values = amax / 448, (weight * (448 / amax)).to(E4M3)
            more = (1, 1.25, 0.75)["qkv".index(name[-6])] if merged and apart else 1.0
            if expert is not None:
                more = (1, 1.25, 0.75)[expert % 3]
            tensors[f"{name}.weight_scale"] = torch.tensor(scale)
            tensors[f"{name}.input_scale"] = torch.tensor(input_scales[kind_of(name)] * more)
        else:
            values, lines = quantize_lines_reference(weight)
            tensors[f"{name}.weight_scale"] = lines[:, None]
        tensors[f"{name}.weight"] = values
    save_file(tensors, directory / MODEL, metadata={"format": "pt"})
    about: dict[str, Any] = {"kv_cache_quant_algo": "FP8" if kv_scales else None}
    if isinstance(algorithms, str):
        plain = ["lm_head", *([] if experts else [EXPERTS]), *excluded]
        about |= {"quant_algo": algorithms, "exclude_modules": plain}
    else:
        table = {name: {"quant_algo": algorithm} for name, algorithm in quantised.items()}
        about |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": table, "group_size": 16}
    write_config(directory, form, about)
    return quantised


def meaning(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A matrix as the checkpoint means it."""
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]


def rounded(x: Tensor, scale: Tensor | None) -> Tensor:
    """What 8 bits leave of inputs, by a scale or each line by its own."""
    if scale is None:
        values, scales = quantize_lines_reference(x.flatten(0, -2))
        return (values.float() * scales[:, None]).view(x.shape)
    return (x * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale


def as_quantised(model: NemotronHForCausalLM, directory: Path, found: Mapping[str, str]) -> None:
    """Have transformers' model compute with the checkpoint's weights, and with inputs of these
    products, keys and values rounded to 8 bits as it says."""
    tensors, layers = load_file(directory / MODEL), set()
    for name in found:
        if expert_of(name) is not None:
            layers.add(name.partition(".experts.")[0] + ".experts")
            continue
        module = model.get_submodule(name.replace("backbone.", "model.", 1))
        module.weight.data, scale = meaning(tensors, name), tensors.get(f"{name}.input_scale")

        def before(_: Any, given: Any, scale: Tensor | None = scale) -> tuple[Tensor]:
            (x,) = given
            return (rounded(x, scale),)

        module.register_forward_pre_hook(before)
    for name, kept in tensors.items():
        if not name.endswith(tuple(KV_SCALES)):
            continue

        def stored(_: Any, __: Any, y: Tensor, scale: Tensor = kept) -> Tensor:
            return rounded(y, scale)

        projection = name.rpartition(".")[0].replace("backbone.", "model.", 1)
        model.get_submodule(projection).register_forward_hook(stored)
    for name in layers:
        module = model.get_submodule(name.replace("backbone.", "model.", 1))
        module.forward = partial(_experts, tensors, name)


def _experts(
    tensors: Mapping[str, Tensor], name: str, x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """Routed experts: inputs of the first product by the largest scale of all."""
    scales = [t for n, t in tensors.items() if re.match(rf"{name}\.\d+\.up_proj\.input_scale", n)]
    x, total = rounded(x, max(scales, default=None)), torch.zeros_like(x)
    for expert in experts.unique().tolist():
        up, down = (f"{name}.{expert}.{which}_proj" for which in ("up", "down"))
        token, choice = (experts == expert).nonzero(as_tuple=True)
        inner = F.relu(x[token] @ meaning(tensors, up).T).square()
        y = rounded(inner, tensors.get(f"{down}.input_scale")) @ meaning(tensors, down).T
        total.index_add_(0, token, y * weights[token, choice, None])
    return total
