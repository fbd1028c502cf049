"""A `vllm serve` in a process of its own, and what it says of itself, for `openai_server.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from replay_steps import SIDES

WATCHED = ("num_requests_running", "num_requests_waiting", "num_preemptions_total")


class Server:
    """One `vllm serve` in a process of its own."""

    def __init__(self, side: str, arguments: list[str], port: int, log: Path) -> None:
        self.side, self.url, self.log = side, f"http://127.0.0.1:{port}", log.open("w")
        self.started = time.perf_counter()
        told = [*arguments, "--host", "127.0.0.1", "--port", str(port)]
        quiet = ["--uvicorn-log-level", "warning"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *told, *quiet],
            env=os.environ | {"HYBRID_RUNTIME_VLLM": SIDES[side]},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def wait(self, seconds: float) -> dict[str, float]:
        """Until it answers."""
        while self.process.poll() is None and time.perf_counter() < self.started + seconds:
            try:
                self.get("/health")
                return {"ready_s": time.perf_counter() - self.started}
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(0.5)
        raise RuntimeError(f"the server does not answer; its log is {self.log.name}")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def gauges(self) -> dict[str, float]:
        """Those of `WATCHED` that it tells."""
        text = self.get("/metrics")
        found = {}
        for name in WATCHED:
            values = re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            found[name] = sum(map(float, values))
        return found

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


class Watch(threading.Thread):
    """Most requests that a server ran at once, and preemptions, until it is stopped."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server, self._end = server, threading.Event()
        self._first, self.found = server.gauges(), {"running": 0.0, "waiting": 0.0}
        self.start()

    def run(self) -> None:
        while not self._end.wait(0.5):
            now = self._server.gauges()
            for name in self.found:
                self.found[name] = max(self.found[name], now[f"num_requests_{name}"])

    def stop(self) -> dict[str, float]:
        self._end.set()
        self.join()
        preempted = WATCHED[-1]
        return {
            **self.found,
            "preemptions": self._server.gauges()[preempted] - self._first[preempted],
        }
