"""A model of another family is served as the shipped one is."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from helpers.http_server import SIZES, completed, running
from helpers.qwen import small_checkpoint

from hybrid_runtime.engine import Engine, SamplingParams

PROMPTS = ["def read(self):\n", "import os\n\n\ndef walk(top):\n    for name in", "x = ["]


def test_texts_of_a_qwen_are_the_engines_own(tmp_path: Path) -> None:
    small_checkpoint(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", drafter=None, block_size=16) as alone:
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        want = [answer.text for answer in alone.generate(PROMPTS, params)]
    assert all(want)
    engine = Engine.from_pretrained(tmp_path, **SIZES)
    with running(engine) as server:

        def ask(number: int) -> str:
            body = {"prompt": PROMPTS[number % 3], "max_tokens": 24, "temperature": 0}
            more = {"ignore_eos": True, "stream": number % 2 == 0}
            return completed(server.post("completions", json=body | more))

        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(ask, range(12)))
        assert found == want * 4
        assert server.metrics()["hybrid_runtime_prefix_hit_tokens_total"] > 0
