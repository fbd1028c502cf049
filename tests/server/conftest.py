"""Where the extra `server` is not installed (on the GPU machine), nothing here is collected."""

from importlib.util import find_spec

INSTALLED = bool(find_spec("fastapi") and find_spec("openai"))
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
if INSTALLED:
    from helpers.http_server import alone, client, served

    __all__ = ["alone", "client", "served"]  # fixtures
