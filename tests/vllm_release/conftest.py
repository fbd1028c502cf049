"""Tests beside a real vLLM: they need its Python files, and no GPU.

PYTHONPATH=<unpacked wheel of vLLM> pytest -m vllm tests/vllm_release
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Not "vllm": that is also a folder of tests.
THERE = importlib.util.find_spec("vllm.v1") is not None
if THERE and not torch.cuda.is_available():
    # vLLM puts a placeholder in Triton's place where no GPU's driver is active, unless this is
    # set and empty; Triton's interpreter needs none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
collect_ignore = [] if THERE else ["test_arguments.py", "test_gdn.py", "test_scheduler.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm_release" in item.path.parts:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.skipif(not THERE, reason="no vLLM to import"))
