"""Can a client that nobody here wrote drive the server? GuideLLM (https://pypi.org/project/guidellm)
sends a serving load to `hybrid-runtime serve` and measures it from outside.

    python benchmarks/engine/public_client.py --guidellm ../bin/guidellm --out guidellm.json

It needs much that the server does not, so it should be installed in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from record import save, show

CHECKPOINT = Path(__file__).parents[2] / "hybrid_runtime" / "checkpoints" / "python-small"
FIGURES = ("time_to_first_token_ms", "inter_token_latency_ms", "request_latency")


@contextmanager
def serving(options: list[str]) -> Iterator[str]:
    """Address of a server process, which must drain and exit with status 0 in the end."""
    command = [sys.executable, "-m", "hybrid_runtime.cli", "serve", str(CHECKPOINT), "--port", "0"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                if not line:
                    raise RuntimeError(f"the server ended with status {process.wait()}")
                found = re.search(r"listening on (http://\S+)", line)
            threading.Thread(target=sys.stderr.writelines, args=[process.stderr]).start()
            yield found[1]
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the server ended with status {process.returncode}")


def measure(args: argparse.Namespace, address: str, streams: int) -> dict[str, Any]:
    """GuideLLM's own report of one load: so many streams, each with one request after the other."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        backend = f"kind=openai_http,target={address},request_format={args.path},http2=false"
        sizes = f"prompt_tokens={args.prompt_tokens},output_tokens={args.output_tokens}"
        command = [
            args.guidellm, "run", "--disable-console",
            "--backend", backend,
            "--profile", f"kind=concurrent,streams={streams}",
            "--constraint", f"kind=max_requests,count={args.requests}",
            "--tokenizer", f"kind=huggingface_auto,model={CHECKPOINT}",
            "--data", f"kind=synthetic_text,{sizes}",
            "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        whole = json.loads(report.read_text())
    metrics = whole["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    row = {"streams": streams, "successful": totals["successful"], "errored": totals["errored"]}
    for name in ("requests_per_second", "output_tokens_per_second"):
        row[name] = metrics[name]["successful"]["mean"]
    for name in FIGURES:
        values = metrics[name]["successful"]
        row[name] = {"mean": values["mean"]} | {
            p: values["percentiles"][p] for p in ("p50", "p95", "p99")
        }
    return row | {"guidellm": whole["metadata"]["guidellm_version"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # No default: the figures under benchmarks/results/ are those of an idle machine.
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--guidellm", default="guidellm", help="the command (default: on the path)")
    parser.add_argument("--path", default="/v1/completions", help="what is asked")
    parser.add_argument("--streams", default="1,4,16", help="requests at once, by load")
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument(
        "--serve", default="--max-requests 16 --block-size 16", help="options of the server"
    )
    args = parser.parse_args()
    with serving(args.serve.split()) as address:
        rows = [measure(args, address, int(streams)) for streams in args.streams.split(",")]
        told = urllib.request.urlopen(f"{address}/metrics").read().decode()
    counted = dict(re.findall(r"^hybrid_runtime_(\w+(?:\{[^}]*\})?) (\S+)$", told, re.M))
    kept = {
        name: float(value) for name, value in counted.items()
        if not re.search(r"_bucket|_created", name)
    }  # fmt: skip
    options = {k: v for k, v in vars(args).items() if k not in ("out", "guidellm")}
    result = {"options": options, "rows": rows, "server": kept}
    print(save("guidellm", result, args.out))
    show("GuideLLM", [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in rows])


if __name__ == "__main__":
    main()
