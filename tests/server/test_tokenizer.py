"""`/tokenize`, `/detokenize`, `/version` and `/ping`, as vLLM has them."""

import importlib.metadata

import pytest
from helpers.http_server import MODEL, Running


@pytest.mark.parametrize("text", ["def é(😀):", ""])
def test_there_and_back(served: Running, text: str) -> None:
    asked = {"model": MODEL, "prompt": text, "return_token_strs": True}
    found = served.http.post("/tokenize", json=asked).json()
    strings = found.pop("token_strs")
    ids = list(text.encode())
    assert found == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    assert strings == [tokenizer.id_to_token(id) for id in ids]
    plain = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert plain.json() == found | {"token_strs": None}
    back = served.http.post("/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": text}


def test_a_conversation(served: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"mood": "good "},
    }  # fmt: skip
    found = served.http.post("/tokenize", json=body).json()
    assert bytes(found["tokens"]).decode() == "user: x\ngood def "


def test_version_and_ping(served: Running) -> None:
    version = importlib.metadata.version("hybrid-runtime")
    assert served.http.get("/version").json() == {"version": version}
    for method in ("GET", "POST"):
        answer = served.http.request(method, "/ping")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
