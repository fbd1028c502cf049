"""What can be set of the server itself: `ServerOptions`."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the server itself; `ValueError` names the one that is wrong."""

    model_name: str
    """What requests call the model, and `/v1/models` lists."""

    api_keys: tuple[str, ...] = ()
    """Keys, one of which every request to a path in `gate.GUARDED` must bring; () = none is needed.
    Requests with different keys never share cached prefixes."""

    max_body_bytes: int = 4 * 2**20
    """Bytes of the largest request body."""

    max_choices: int = 128
    """Most completions (prompts × `n`), or embeddings, of one request."""

    max_concurrency: int = 1024
    """Most requests to these paths that are open at once; others get status 429 before their body
    is read."""

    body_seconds: float = 30.0
    """Seconds within which a request's body must arrive."""

    drain_seconds: float = 30.0
    """Seconds that open requests have to end after SIGTERM or SIGINT; then they are aborted."""

    access_log: bool = False
    """Log a line per request."""

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name is ''; it must hold at least one character")
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ValueError("api_keys holds a key that is empty or not ASCII; every key must be")
        for name in ("max_body_bytes", "max_choices", "max_concurrency"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        for name in ("body_seconds", "drain_seconds"):
            seconds = getattr(self, name)
            if not math.isfinite(seconds) or seconds <= 0:
                raise ValueError(f"{name} is {seconds!r}; it must be a number above 0")
