"""Where the extra `server` is not installed (on the GPU machine), nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("fastapi") and find_spec("openai") else ["test_*.py"]
