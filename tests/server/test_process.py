"""`hybrid-runtime serve` as a process: signals, drains, and a restart at the same address."""

import asyncio
import gc
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from helpers.http_server import shipped

from hybrid_runtime import demo
from hybrid_runtime.server import run
from hybrid_runtime.server.options import ServerOptions

MODEL = str(demo.SHIPPED)
OPTIONS = ("--drafter", "none", "--max-requests", "2", "--block-size", "16", "--device", "cpu")
LONG = {"prompt": "import ", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


@contextmanager
def served(*options: str, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server process and a client of it."""
    command = [sys.executable, "-m", "hybrid_runtime.cli", "serve", MODEL, "--port", str(port)]
    with subprocess.Popen(
        [*command, *OPTIONS, *options], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            else:
                pytest.fail("".join(said))
            with httpx.Client(base_url=found[1], timeout=60, verify=False) as client:
                yield process, client
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "options", "status"),
    [
        ([signal.SIGTERM, signal.SIGINT], [], 130),
        ([signal.SIGINT], ["--drain-seconds", "0.05"], 130),
    ],
)
def test_a_drain_that_is_cut_short_ends_streams_and_leaves_no_traceback(
    signals: list[signal.Signals], options: list[str], status: int
) -> None:
    body = LONG | {"max_tokens": 32000, "stream": True}  # no machine is done before it is cut
    room = ("--max-model-len", "32768", "--num-blocks", "2100", "24")
    with served(*options, *room) as (process, client):
        assert process.stderr is not None
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            got = [next(lines)]
            for sent in signals:
                process.send_signal(sent)
                if sent is not signals[-1]:
                    next(line for line in process.stderr if "Shutting down" in line)
            got += [line for line in lines if line]
        assert got[-1] == "data: [DONE]"
        assert '"finish_reason":"abort"' in got[-2]
        assert process.wait(60) == status
        assert "Traceback" not in process.stderr.read()


@pytest.mark.slow
def test_killed_and_started_again_at_the_same_address() -> None:
    """And that SIGTERM lets open requests end."""
    with served() as (process, client):
        port = client.base_url.port
        want = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    assert port is not None
    with served(port=port) as (process, client):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            got = [next(lines)]
            process.send_signal(signal.SIGTERM)
            got += lines
        assert got[-2:] == ["data: [DONE]", ""]
        assert "".join(re.findall(r'"text":"(.*?)","logprobs"', "".join(got))) == repr(want)[1:-1]
        assert process.wait(60) == 0


def test_what_was_built_before_is_not_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = []

    class Watched(run.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            frozen.append(gc.get_freeze_count())
            self.should_exit = True

    monkeypatch.setattr(run, "Server", Watched)
    with run.bind("127.0.0.1", 0) as bound:
        run.serve(shipped(), ServerOptions(model_name="small"), bound)
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0


def test_a_second_sigint_ends_the_drain_and_a_third_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    class Interrupted(run.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(0)
                seen.append((signal.getsignal(signal.SIGINT), self._hurry.is_set()))

    monkeypatch.setattr(run, "Server", Interrupted)
    with run.bind("127.0.0.1", 0) as bound, pytest.raises(KeyboardInterrupt):
        run.serve(shipped(), ServerOptions(model_name="small"), bound)
    assert [hurries for _, hurries in seen] == [False, True]
    assert seen[1][0] == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
