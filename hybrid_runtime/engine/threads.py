"""How many threads a model's operations get on a CPU."""

from __future__ import annotations

import torch

from hybrid_runtime.engine.checks import check_integer
from hybrid_runtime.models.model import HybridModel

SMALL = 1024
"""Hidden size up to which a model's operations are too small to be shared by CPU threads."""


def use_threads(asked: int | None, model: HybridModel) -> None:
    """Threads of PyTorch's CPU kernels: as many as asked for; None: one for a small model, whose
    operations take less time than waiting for a second thread does."""
    if asked is not None:
        check_integer("threads", asked, 1)
        torch.set_num_threads(asked)
    elif model.hidden_size <= SMALL:
        torch.set_num_threads(1)
