"""Log-probabilities in OpenAI's forms, where the model's own have no such form."""

from __future__ import annotations

import json
import math

from hybrid_runtime.engine import TokenLogprobs
from hybrid_runtime.server.logprobs import of_chat, of_completion

SPELLING = {0: "a", 1: "�", 2: "�", 3: "ß"}
TOLD = [TokenLogprobs(-1.0, [(1, -0.5), (2, -0.6)]), TokenLogprobs(-math.inf, [(0, -0.1)])]


def test_what_json_cannot_say() -> None:
    """Minus infinity; and tokens whose text is the same."""
    spell = SPELLING.__getitem__
    found = of_completion([0, 3], TOLD, spell, 7)
    assert found == {
        "tokens": ["a", "ß"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"a": -1.0, "�": -0.5}, {"ß": -9999.0, "a": -0.1}],
        "text_offset": [7, 8],
    }
    chat = of_chat([0, 3], TOLD, spell)
    assert [entry["bytes"] for entry in chat["content"]] == [[97], list("ß".encode())]
    json.dumps([found, chat], allow_nan=False)
