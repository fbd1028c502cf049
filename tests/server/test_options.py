"""Options of `serve`: every one reaches the server or the engine, and a wrong one is one line."""

import socket
from typing import Any

import pytest

from hybrid_runtime import demo
from hybrid_runtime.cli import main, parser
from hybrid_runtime.engine import EngineConfig
from hybrid_runtime.server.command import KEY_VARIABLE, engine_options, server_options
from hybrid_runtime.server.options import ServerOptions

MODEL = str(demo.SHIPPED)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_name": ""}, "model_name is ''"),
        ({"api_keys": ("",)}, "api_keys holds a key"),
        ({"api_keys": ("é",)}, "api_keys holds a key"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_choices": 1.5}, "max_choices is 1.5"),
        ({"drain_seconds": float("nan")}, "drain_seconds is nan"),
        ({"body_seconds": 0}, "body_seconds is 0"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerOptions(**{"model_name": "x"} | wrong)


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
        (["--max-requests", "0"], "max_requests is 0"),
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
