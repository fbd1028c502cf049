"""Tokens that end a text because a stop string lies in them whole."""

from __future__ import annotations

from threading import Lock

from tokenizers import Tokenizer

from hybrid_runtime.specdecode.sampling import SamplingParams


class StopTokens:
    """Finds them among all tokens of a vocabulary, for any thread.

    The device looks for them, to hold back a request that they may end. What a text ends with is
    decided by its characters alone: where these say otherwise the request goes on, a little later.
    So tokens may be left out, or named too often.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._texts: list[str] = []
        self._found: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._lock = Lock()

    def of(self, params: SamplingParams) -> tuple[int, ...]:
        """Tokens that have a stop string of `params` in them. None where the text may go on behind
        one (`min_tokens`)."""
        if not params.stop or params.min_tokens:
            return ()
        stops = tuple(params.stop)
        with self._lock:
            if stops not in self._found:
                if not self._texts:
                    each = [[token] for token in range(self._vocabulary)]
                    self._texts = self._tokenizer.decode_batch(each, skip_special_tokens=False)
                if len(self._found) >= MOST_SETS:
                    self._found.clear()
                texts = enumerate(self._texts)
                self._found[stops] = tuple(t for t, text in texts if any(s in text for s in stops))
            return self._found[stops]


MOST_SETS = 64
"""Of stop strings whose tokens are remembered."""
