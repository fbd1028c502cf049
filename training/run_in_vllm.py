"""Load the checkpoint in vLLM (tried with 0.25.1, GPU needed) and print what its drafts reach.

``python -m training.run_in_vllm DIRECTORY --method mtp`` (or ``eagle``, or ``none``).
"""

import argparse
import os
from pathlib import Path

from .corpus import default_root, read_files, windows

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--method", choices=["mtp", "eagle", "none"], default="mtp")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--stdlib", type=Path, default=default_root())
    args = parser.parse_args()
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    draft: dict[str, object] | None = None
    if args.method != "none":
        draft = {"method": args.method, "num_speculative_tokens": args.drafts}
        draft["attention_backend"] = "TRITON_ATTN"
        if args.method == "eagle":
            draft["model"] = str(args.checkpoint / "eagle")
    llm = LLM(
        model=str(args.checkpoint),
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(args.prompts, 4),
        max_num_batched_tokens=4096,
        enforce_eager=True,
        enable_prefix_caching=True,
        mamba_cache_mode="align",
        mamba_ssm_cache_dtype="float32",
        gpu_memory_utilization=0.3,
        attention_config={"backend": "TRITON_ATTN"},
        tensor_parallel_size=args.tensor_parallel,
        speculative_config=draft,
        disable_log_stats=False,
    )
    rows = windows(read_files(args.stdlib)[1], args.prompt_tokens, args.prompts)
    prompts = [{"prompt_token_ids": row.tolist()} for row in rows]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=args.tokens))
    cache = llm.llm_engine.vllm_config.cache_config
    print(f"block_size {cache.block_size} mamba_block_size {cache.mamba_block_size}")
    for output in outputs[:4]:
        print("TOKENS", output.outputs[0].token_ids)
        print("TEXT", repr(output.outputs[0].text))
    counts: dict[str, float] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value"):
            counts[metric.name] = metric.value
    print(args.method, counts)
    if steps := counts.get("vllm:spec_decode_num_drafts"):
        accepted = counts["vllm:spec_decode_num_accepted_tokens"]
        print(f"{args.method}: mean acceptance length {1 + accepted / steps:.3f}")


if __name__ == "__main__":
    main()
