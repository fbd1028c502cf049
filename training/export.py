"""Write the trained modules as a Hugging Face checkpoint directory, and round to what it holds."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from .shapes import EAGLE, END_OF_TEXT, PAD, TARGET

#: Kept in fp32 by every reader of these checkpoints; everything else is bfloat16.
FP32_SUFFIX = "e_score_correction_bias"


@torch.no_grad()
def round_weights(module: nn.Module) -> None:
    """Round all parameters to bfloat16 in place, so that training goes on from what is shipped."""
    for parameter in module.parameters():
        parameter.copy_(parameter.bfloat16())


def tensors(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    """State of ``module`` on the CPU in the checkpoint's dtypes."""
    return {
        prefix + name: value.detach().cpu().to(
            torch.float32 if name.endswith(FP32_SUFFIX) else torch.bfloat16
        ).contiguous().clone()
        for name, value in module.state_dict().items()
    }  # fmt: skip


def load_weights(module: nn.Module, path: Path, prefix: str = "") -> None:
    """Fill ``module`` from the tensors of ``path`` whose names start with ``prefix``."""
    found = load_file(path)
    module.load_state_dict(
        {name: found[prefix + name].float() for name in module.state_dict()}, strict=True
    )


def byte_symbols() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}


def build_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: token id = byte value, then two special tokens."""
    tokenizer = Tokenizer(models.BPE(vocab=byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|pad|>")]
    tokenizer.add_special_tokens(special)
    if (
        tokenizer.token_to_id("<|endoftext|>") != END_OF_TEXT
        or tokenizer.token_to_id("<|pad|>") != PAD
    ):
        raise ValueError("tokenizer: the special tokens must follow the 256 bytes")
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(directory: Path, trunk: nn.Module, mtp: nn.Module, eagle: nn.Module) -> None:
    """Write configurations, weights and tokenizer below ``directory`` (made if missing)."""
    (directory / "eagle").mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", TARGET)
    _write_json(directory / "eagle" / "config.json", EAGLE)
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TEXT, "pad_token_id": PAD}
    _write_json(directory / "generation_config.json", ends)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": TARGET["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **names,
        },
    )
    _write_json(directory / "special_tokens_map.json", dict(names))
    build_tokenizer().save(str(directory / "tokenizer.json"))
    meta = {"format": "pt"}
    weights = tensors(trunk) | tensors(mtp, "mtp.")
    save_file(weights, directory / "model.safetensors", metadata=meta)
    save_file(tensors(eagle), directory / "eagle" / "model.safetensors", metadata=meta)
    for path in directory.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner may read
