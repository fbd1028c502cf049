"""Which device is meant."""

from __future__ import annotations

import torch


def select_device(device: torch.device | str | None = None) -> torch.device:
    """The device of that name; None: a GPU where there is one.

    Raises:
        ValueError: no such device, or none that this package runs on.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(chosen)!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        found = f"finds {count} of them" if count else "finds no GPU"
        raise ValueError(f"device is {str(chosen)!r}, but PyTorch {found} here; it must be there")
    return chosen
