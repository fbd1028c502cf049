"""`hybrid-runtime serve` as a process: it drains, dies and comes back, and says what is wrong."""

from __future__ import annotations

import argparse
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
from hybrid_runtime.cli import main, parser
from hybrid_runtime.engine import EngineConfig
from hybrid_runtime.server import run
from hybrid_runtime.server.command import KEY_VARIABLE, engine_options, server_options
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
def test_sigterm_lets_open_requests_end() -> None:
    with served() as (process, client):
        want = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            got = [next(lines)]
            process.send_signal(signal.SIGTERM)
            got += lines
        assert got[-2:] == ["data: [DONE]", ""]
        assert "".join(re.findall(r'"text":"(.*?)","logprobs"', "".join(got))) == repr(want)[1:-1]
        assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "options", "status"),
    [
        ([signal.SIGINT, signal.SIGINT], [], 130),
        ([signal.SIGTERM, signal.SIGINT], [], 130),
        ([signal.SIGTERM], ["--drain-seconds", "0.05"], 0),
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
    with served() as (process, client):
        port = client.base_url.port
        want = client.post("/v1/completions", json=LONG).json()["choices"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            lines = stream.iter_lines()
            assert next(lines)
            process.kill()
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    assert port is not None
    with served(port=port) as (_, client):
        assert client.post("/v1/completions", json=LONG).json()["choices"] == want


def test_an_address_in_use_is_said_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/no/such/place", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-body-bytes", "0"], "max_body_bytes is 0"),
        (["--api-key", ""], "api_keys holds a key"),
        (["--max-requests", "0"], "max_requests is 0"),
        (["--retention", "7"], "retention is 7"),
        (["--drafter", "abacus"], "drafter is 'abacus'"),
        (["--num-blocks", "0", "4"], "num_blocks is 0"),
        (["--port", "70000"], "port is 70000"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", MODEL, "--port", "0", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("hybrid-runtime: error: ")
    assert error.count("\n") == 1


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other user of the machine sees them."""
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    for given, keys in (([], ("secret",)), (["--api-key", "a", "--api-key", "b"], ("a", "b"))):
        options = server_options(parser().parse_args(["serve", MODEL, *given]))
        assert (options.api_keys, options.model_name) == (keys, "python-small")


def test_every_option_of_the_engine_can_be_set() -> None:
    given = {
        "drafter": "none", "max_requests": "3", "ssm_dtype": "float16", "retention": "112",
        "num_blocks": "100 50", "graphs": None, "memory_fraction": "0.5", "block_size": "112",
    }  # fmt: skip
    line = [f"--{name.replace('_', '-')} {value or ''}" for name, value in given.items()]
    arguments = ["serve", MODEL, "--no-prefix-caching", *" ".join(line).split()]
    config = EngineConfig(**engine_options(parser().parse_args(arguments)))
    assert config == EngineConfig(
        drafter=None, max_requests=3, ssm_dtype="float16", retention=112, num_blocks=(100, 50),
        graphs=True, memory_fraction=0.5, block_size=112, prefix_caching=False, max_waiting=256,
    )  # fmt: skip


def test_no_option_lacks_help() -> None:
    (commands,) = (
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    serve = commands.choices["serve"]
    assert [action.option_strings for action in serve._actions if not action.help] == []
    assert "requests that run at once (8)" in " ".join(serve.format_help().split())


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
