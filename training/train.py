"""Train the shipped checkpoint: trunk with a light MTP loss, then both draft heads, then figures.

On one H200 the defaults with ``--compile`` take about ten minutes. On a CPU try the whole way with
``python -m training.train --out build/tiny --steps 5 --head-steps 5 --batch 2 --head-batch 2
--length 128 --prompts 4 --continuation 16`` (half a minute on two cores; the result is noise).
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor, nn

from .corpus import default_root, join, read_files, windows
from .evaluate import acceptance, bits_per_byte, continue_greedily
from .export import load_weights, round_weights, write_checkpoint
from .heads import MTP, Eagle, routers, unroll
from .shapes import EAGLE, END_OF_TEXT, TARGET
from .trunk import Trunk


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    parser.add_argument("--stdlib", type=Path, default=default_root(), help="library to train on")
    parser.add_argument("--steps", type=int, default=11500, help="trunk steps")
    parser.add_argument("--head-steps", type=int, default=4500, help="draft head steps")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="cap of the trunk's time; 0: none"
    )
    parser.add_argument("--head-minutes", type=float, default=0.0, help="cap of the heads' time")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step")
    parser.add_argument("--head-batch", type=int, default=24, help="same for the heads")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--passes", type=int, default=4, help="passes unrolled for the heads")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--head-lr", type=float, default=1.2e-3)
    parser.add_argument("--mtp-weight", type=float, default=0.2, help="MTP loss in trunk training")
    parser.add_argument("--prompts", type=int, default=192, help="left-out prompts continued")
    parser.add_argument("--continuation", type=int, default=96, help="greedy tokens per prompt")
    parser.add_argument("--trunk", type=Path, help="checkpoint whose trunk to keep: heads only")
    parser.add_argument("--heads", choices=["both", "mtp", "eagle"], default="both")
    parser.add_argument("--keep-heads", action="store_true", help="start from --trunk's heads too")
    parser.add_argument("--compile", action="store_true", help="torch.compile the trunk's loss")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Batches:
    """Random windows of the joined training files, kept on the device."""

    def __init__(self, files: list[bytes], device: torch.device, seed: int) -> None:
        self.stream = torch.from_numpy(join(files)).to(device)
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, batch: int, length: int) -> Tensor:
        """int64 [batch, length]."""
        span = (0, len(self.stream) - length)
        device = self.stream.device
        start = torch.randint(*span, (batch, 1), device=device, generator=self.generator)
        return self.stream[start + torch.arange(length, device=device)].long()


def optimizer_for(modules: Iterable[nn.Module], lr: float, fused: bool) -> torch.optim.AdamW:
    """AdamW; only matrices other than the embedding decay."""
    decay: list[Tensor] = []
    keep: list[Tensor] = []
    for module in modules:
        for name, parameter in module.named_parameters():
            matrix = parameter.ndim == 2 and "embeddings" not in name
            (decay if matrix else keep).append(parameter)
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": keep, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def run(
    title: str,
    modules: list[nn.Module],
    loss_of: Callable[[], Tensor],
    steps: int,
    minutes: float,
    lr: float,
) -> None:
    """Optimise until ``steps`` or ``minutes`` (0: no cap) are over; cosine in what ends first."""
    parameters = [p for m in modules for p in m.parameters()]
    device = parameters[0].device
    optimizer = optimizer_for(modules, lr, fused=device.type == "cuda")
    gates = [g for m in modules for g in routers(m)]
    start = time.perf_counter()
    done, loss = 0, torch.zeros(())
    for step in track(range(steps), description=title):
        spent = time.perf_counter() - start if step > 1 else 0.0
        progress = max(step / steps, spent / (60 * minutes) if minutes else 0.0)
        if progress >= 1:
            break
        if step == 1:
            start = time.perf_counter()  # the first step compiles; it must not eat the schedule
        warm = min(1.0, (step + 1) / 200)
        rate = lr * warm * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        for module in modules:  # apart, so that one head's spike does not stop the other
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        for gate in gates:
            gate.balance(1e-3 * (1 - progress))
        done = step + 1
        if step % 50 == 0:
            value = loss.item()  # also keeps the clock honest: the device is never far behind
            if step % 500 == 0:
                print(f"{title} step {step} loss {value:.4f} t {spent:.0f}s", flush=True)
    seconds = time.perf_counter() - start  # without the first step
    print(f"{title} final loss {loss.item():.4f}, {done} steps in {seconds:.0f} s", flush=True)


def trunk_loss_of(trunk: Trunk, mtp: MTP, weight: float) -> Callable[[Tensor], Tensor]:
    """Next-token loss plus ``weight`` times the MTP head's, of tokens [batch, length + 1]."""

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            hidden = trunk(tokens[:, :-1])
            logits = trunk.lm_head(hidden)
            ahead = unroll(mtp, trunk.backbone.embeddings, tokens[:, :-1], hidden, 1)[0]
            draft = trunk.lm_head(ahead)
        first = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        second = F.cross_entropy(draft.flatten(0, 1).float(), tokens[:, 2:].flatten())
        return first + weight * second

    return loss


def head_loss_of(trunk: Trunk, heads: list[nn.Module], passes: int) -> Callable[[Tensor], Tensor]:
    """Distance of every pass of every head from what the frozen trunk says one token later."""

    def loss(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                hidden = trunk(tokens)
                target = trunk.lm_head(hidden).float()
            for head in heads:
                outputs = unroll(head, trunk.backbone.embeddings, tokens, hidden, passes)
                starts = outputs[0].shape[1]
                for k, out in enumerate(outputs):
                    want = target[:, k + 1 : k + 1 + starts]
                    got = trunk.lm_head(out).float().log_softmax(-1)
                    soft = -(want.softmax(-1) * got).sum(-1).mean()
                    hard = F.nll_loss(got.flatten(0, 1), want.argmax(-1).flatten())
                    total = total + 0.8**k * (0.5 * soft + 0.5 * hard)
        return total

    return loss


def report(
    trunk: Trunk,
    heads: dict[str, nn.Module],
    train: list[bytes],
    left_out: list[bytes],
    args: argparse.Namespace,
) -> dict[str, object]:
    """Bits per byte, and the acceptance of 3 drafts per head on the left-out files."""  # fmt: skip
    device = next(trunk.parameters()).device
    torch.backends.cuda.matmul.allow_tf32 = False
    figures: dict[str, object] = {
        "train_bytes": sum(map(len, train)),
        "left_out_bytes": sum(map(len, left_out)),
        "left_out_files": len(left_out),
    }
    for name, files in (("train", train), ("left_out", left_out)):
        rows = windows(files, args.length + 1, 256 if device.type == "cuda" else 4)
        figures[f"bits_per_byte_{name}"] = bits_per_byte(trunk, rows, args.length // 4)
    prompts = torch.from_numpy(windows(left_out, 256, args.prompts)).to(device)
    text = continue_greedily(trunk, prompts, args.continuation)
    for name, head in heads.items():
        figures[name] = asdict(acceptance(trunk, head, text, 256, 3, END_OF_TEXT))
    return figures


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, left_out = read_files(args.stdlib)
    print(f"{sum(map(len, train))} training bytes, {sum(map(len, left_out))} left out")
    batches = Batches(train, device, args.seed)
    trunk, mtp, eagle = Trunk(TARGET).to(device), MTP(TARGET).to(device), Eagle(EAGLE).to(device)
    heads: dict[str, nn.Module] = {"mtp": mtp, "eagle": eagle}
    trained = [head for name, head in heads.items() if args.heads in (name, "both")]
    trunk_loss = trunk_loss_of(trunk, mtp, args.mtp_weight)
    head_loss = head_loss_of(trunk, trained, args.passes)
    if args.compile:
        trunk_loss = torch.compile(trunk_loss)
    if args.trunk:
        load_weights(trunk, args.trunk / "model.safetensors")
        if args.keep_heads or args.heads == "eagle":
            load_weights(mtp, args.trunk / "model.safetensors", "mtp.")
        if args.keep_heads or args.heads == "mtp":
            load_weights(eagle, args.trunk / "eagle" / "model.safetensors")
    else:
        run(
            "trunk",
            [trunk, mtp],
            lambda: trunk_loss(batches(args.batch, args.length + 1)),
            args.steps,
            args.minutes,
            args.lr,
        )
    trunk.eval().requires_grad_(False)
    round_weights(trunk)
    write_checkpoint(args.out, trunk, mtp, eagle)  # of use even if the heads are interrupted
    run(
        "heads",
        trained,
        lambda: head_loss(batches(args.head_batch, args.length + args.passes)),
        args.head_steps,
        args.head_minutes,
        args.head_lr,
    )
    for head in heads.values():
        head.eval()
        round_weights(head)
    write_checkpoint(args.out, trunk, mtp, eagle)
    print(json.dumps(report(trunk, heads, train, left_out, args), indent=1))


if __name__ == "__main__":
    main()
