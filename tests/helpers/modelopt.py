"""Checkpoints in 8 bits as ModelOpt writes them, made of plain ones, and what transformers' model
computes with them."""

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHForCausalLM

from hybrid_runtime.kernels.linear.quantize import E4M3, quantize_lines_reference

MODEL, BESIDE = "model.safetensors", "hf_quant_config.json"
MATRIX = re.compile(
    r"backbone\.layers\.\d+\.mixer\.(?:shared_experts\.)?(in|out|up|down|q|k|v|o)_proj"
)
EXPERTS = "*mixer.experts*"
KV_SCALES = {"k_scale": 0.004, "v_scale": 0.003}
"""Of the small random models: their largest keys and values are cut off."""
Form = Literal["beside", "config", "nested", "both"]


def kind_of(name: str) -> str:
    """Of a matrix: what its input is."""
    found = MATRIX.fullmatch(name)
    assert found
    return {"k": "q", "v": "q"}.get(found[1], found[1])


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
) -> dict[str, str]:
    """Turn a plain checkpoint into one in 8 bits.

    Args:
        input_scales: by the kind of a matrix.
        algorithms: of all matrices, or by patterns of their names: a table.
        excluded: patterns of matrices that stay plain, besides routed experts.
        kv_scales: of keys and values of all attention layers, by their names.
        apart: q, k and v have scales of their own, else the largest of the three.

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
            more = (1, 1.25, 0.75)["qkv".index(name[-6])] if merged and apart else 1
            tensors[f"{name}.weight_scale"] = torch.tensor(scale)
            tensors[f"{name}.input_scale"] = torch.tensor(input_scales[kind_of(name)] * more)
        else:
            values, lines = quantize_lines_reference(weight)
            tensors[f"{name}.weight_scale"] = lines[:, None]
        tensors[f"{name}.weight"] = values
    save_file(tensors, directory / MODEL, metadata={"format": "pt"})
    about: dict[str, Any] = {"kv_cache_quant_algo": "FP8" if kv_scales else None}
    if isinstance(algorithms, str):
        about |= {"quant_algo": algorithms, "exclude_modules": ["lm_head", EXPERTS, *excluded]}
    else:
        table = {name: {"quant_algo": algorithm} for name, algorithm in quantised.items()}
        about |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": table, "group_size": 16}
    write_config(directory, form, about)
    return quantised


def dequantised(directory: Path, name: str) -> Tensor:
    """A matrix as the checkpoint means it."""
    tensors = load_file(directory / MODEL)
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.weight_scale"]


def as_quantised(model: NemotronHForCausalLM, directory: Path, found: Mapping[str, str]) -> None:
    """Have transformers' model compute with the checkpoint's weights, and with inputs of these
    products, keys and values rounded to 8 bits as it says."""
    tensors = load_file(directory / MODEL)
    for name, algorithm in found.items():
        module = model.get_submodule(name.replace("backbone.", "model.", 1))
        module.weight.data = dequantised(directory, name)

        def rounded(
            _: Any, given: Any, each: bool = algorithm != "FP8", name: str = name
        ) -> tuple[Tensor]:
            (x,) = given
            if each:
                values, scale = quantize_lines_reference(x.flatten(0, -2))
                return ((values.float() * scale[:, None]).view(x.shape),)
            scale = tensors[f"{name}.input_scale"]
            return ((x * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale,)

        module.register_forward_pre_hook(rounded)

    for name, scale in tensors.items():
        if not name.endswith(tuple(KV_SCALES)):
            continue

        def stored(_: Any, __: Any, y: Tensor, scale: Tensor = scale) -> Tensor:
            return (y * (1 / scale)).clamp(-448, 448).to(E4M3).float() * scale

        projection = name.rpartition(".")[0].replace("backbone.", "model.", 1)
        model.get_submodule(projection).register_forward_hook(stored)
