"""`/v1/embeddings`: the `openai` client gets the engine's vectors."""

import openai
import pytest
import torch
from helpers.http_server import MODEL

from hybrid_runtime.engine import Engine

INPUTS = ["def main(", "import ", "class Stack:\n    def push(self, x):\n        ", "try:\n    "]


@pytest.mark.parametrize("form", ["float", "base64"])
def test_embeddings(client: openai.OpenAI, alone: Engine, form: str) -> None:
    want = alone.embed(INPUTS, "mean", "Code: ")
    asked = {"model": MODEL, "extra_body": {"pooling": "mean", "instruction": "Code: "}}
    answer = client.embeddings.create(input=INPUTS, encoding_format=form, **asked)
    if form == "base64":  # the client decodes only what it has itself asked for in base64
        answer = client.embeddings.create(input=INPUTS, **asked)
    got = torch.tensor([entry.embedding for entry in answer.data])
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert answer.usage.prompt_tokens == sum(map(len, INPUTS)) + 4 * len("Code: ")
    one = client.embeddings.create(model=MODEL, input=list(b"import "), dimensions=192)
    assert len(one.data[0].embedding) == 192
