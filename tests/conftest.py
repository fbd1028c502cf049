"""What every test runs under: one thread, no hub, no luck with uninitialised memory."""

import os
import sys
from pathlib import Path

# Read when torch and huggingface_hub are imported, and inherited by processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["HF_HUB_OFFLINE"] = "1"

# `python -m pytest` puts the checkout on sys.path, where our folder `kernels` would stand in for
# the package of that name on PyPI, which transformers imports.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Both without time limits: these machines are shared. `--hypothesis-profile dev` takes the other:
# new histories each time, and in the pools' machine more of them.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", derandomize=True, database=None, print_blob=True, **UNTIMED)
settings.register_profile("dev", print_blob=True, **UNTIMED)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["PYTEST_MARKEXPR"] = config.option.markexpr  # for processes that tests start
    torch.set_num_threads(1)
    # Fills what torch.empty and its like return with NaN, or the largest integer: reading memory
    # that nobody wrote fails then, instead of passing when the memory happens to hold zeros.
    # (torch.use_deterministic_algorithms would import its compiler, a second or two a process.)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    if torch.cuda.is_available():
        from hybrid_runtime.engine import memory_plan

        # An engine fills its GPU with blocks, and these processes share one.
        memory_plan.MOST_BLOCKS = 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another process runs, see helpers/interpreter.py."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        others = {"plain", "interpreter"}
    else:
        others = {"interpreter"} if torch.cuda.is_available() else {"kernels"}
    left_out = [item for item in items if others & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
