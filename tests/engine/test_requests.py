"""Life of a request in the engine: ends, limits, aborts, errors, streams, and refused input."""

from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.small_engine import NEW_TOKENS, VOCABULARY, Make, Script, drain, fail_at
from torch import Tensor

from hybrid_runtime.engine import Completion, QueueFull, Request, SamplingParams, TokenLogprobs
from hybrid_runtime.specdecode.drafter import VerifyOutput

N_GRAM = {"drafter": "ngram", "num_speculative_tokens": 3, "block_size": 8}


def test_ends_at_stop_tokens_and_end_of_text(make: Make, prompts: Any, wanted: Any) -> None:
    prompt, text = prompts[3], wanted[3]
    token = text[10]
    first = text.index(token)
    runs = make(**N_GRAM)
    params = SamplingParams(max_tokens=NEW_TOKENS, stop_token_ids=(token,))
    answer = runs.generate([prompt], params)[0]
    assert (answer.tokens, answer.finish_reason) == (text[:first], "stop")
    runs.core.eos = frozenset([token])
    answer = runs.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))[0]
    assert (answer.tokens, answer.finish_reason) == (text[:first], "stop")
    on = runs.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))[0]
    assert (on.tokens, on.finish_reason) == (text, "length")


def test_ends_at_a_stop_string_and_cuts_it(make: Make, prompts: Any, wanted: Any) -> None:
    stop = f"t{wanted[4][7]} t{wanted[4][8]}"
    whole = " ".join(f"t{t}" for t in wanted[4])
    runs = make(**N_GRAM)
    params = SamplingParams(max_tokens=NEW_TOKENS, stop=(stop,))
    answer = runs.generate([prompts[4]], params)[0]
    assert answer.finish_reason == "stop"
    assert answer.text.strip() == whole[: whole.index(stop)].strip()
    # A stream must not have shown the beginning of what is cut.
    assert "".join(runs.stream(prompts[4], params)) == answer.text


def test_what_may_begin_a_stop_string_is_not_settled() -> None:
    params = SamplingParams(stop=("abcd", "cb"))
    for text, settled in (("xa", 1), ("xab", 1), ("xabc", 1), ("xabx", 4), ("xc", 1)):
        request = Request(0, np.zeros(1, np.int32), params, seed=0, text=text)
        assert request.settled == settled, text
        request.finish_reason = "length"
        assert request.settled == len(text)
    request.text = "cbx"
    assert (request._cut(0), request.text) == (True, "")


def test_tokens_that_arrive_together_share_their_time() -> None:
    request = Request(0, np.zeros(1, np.int32), SamplingParams(), seed=0, submitted=1.0)
    request.times, request.finish_reason = [(1.5, 2), (2.5, 2), (5.5, 1)], "length"
    answer = Completion.of(request)
    assert (answer.time_to_first_token, answer.itl) == (0.5, [0.5, 0.5, 3.0])


def test_log_probabilities_of_tokens_that_come_again_are_told_once() -> None:
    """An exception between them and their tokens has these computed again."""
    params = SamplingParams(logprobs=0, max_tokens=4)
    request = Request(0, np.zeros(1, np.int32), params, seed=0)
    again = [TokenLogprobs(-1.0, []), TokenLogprobs(-2.0, [])]
    for told in (again[:1], again):
        request.note_logprobs(told)
    assert request.append([5, 6], None, (), 10) is None
    assert request.output_logprobs == again


def test_a_full_model_length_ends_a_request(make: Make, prompts: Any, wanted: Any) -> None:
    runs = make(**N_GRAM | {"max_model_len": len(prompts[5]) + 5})
    answer = runs.generate([prompts[5]], SamplingParams(max_tokens=NEW_TOKENS))[0]
    assert (answer.tokens, answer.finish_reason) == (wanted[5][:5], "length")


def test_completions_of_a_prompt_are_those_of_their_seeds(make: Make, prompts: Any) -> None:
    runs = make(**N_GRAM)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=4, n=3)
    answers = runs.generate(prompts[2:4], [params, SamplingParams(max_tokens=6)])
    assert len(answers) == 4
    assert len({tuple(a.tokens) for a in answers[:3]}) == 3
    for answer, one in zip(answers[:3], params.each(), strict=True):
        assert answer.tokens == runs.generate([prompts[2]], one)[0].tokens
    with pytest.raises(ValueError, match=r"^n is 3, must be 1: submit each"):
        runs.submit(prompts[2], params)
    with pytest.raises(ValueError, match=r"^logit_bias is .* must be of tokens in 0\.\.95"):
        runs.submit(prompts[2], SamplingParams(logit_bias={VOCABULARY: 1}))


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_abort_touches_nobody_else(
    make: Make, prompts: Any, wanted: Any, after: int, steps_ahead: int
) -> None:
    runs = make(**N_GRAM | {"max_requests": 4, "steps_ahead": steps_ahead})
    requests = [runs.submit(p, SamplingParams(max_tokens=NEW_TOKENS)) for p in prompts]
    for _ in range(after):
        runs.step()
    for i in (0, 3, 7):  # running and waiting ones
        runs.abort(requests[i])
        runs.abort(requests[i])
    drain(runs)
    for i, request in enumerate(requests):
        if i in (0, 3, 7):
            assert request.finish_reason == "abort"
            assert request.output == wanted[i][: len(request.output)]
        else:
            assert request.output == wanted[i]


class Raises(Script):
    """A drafter that fails in its fifth step."""

    calls = 0

    def propose(self, output: VerifyOutput, count: int) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("no drafts today")
        return super().propose(output, count)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("where", ["forward pass", "drafter"])
def test_a_failing_step_ends_its_requests_and_no_others(
    make: Make, prompts: Any, wanted: Any, where: str, steps_ahead: int
) -> None:
    runs = make(**N_GRAM | {"max_requests": 3, "steps_ahead": steps_ahead})
    if where == "drafter":
        texts = [p + w for p, w in zip(prompts, wanted, strict=True)]
        runs.runner.drafter = Raises(texts, 3, [2, 1, 3, 0])
    else:
        runs.model.register_forward_pre_hook(fail_at(4, RuntimeError("no drafts today")))
    answers = runs.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS), raise_errors=False)
    failed = [a for a in answers if a.finish_reason == "error"]
    assert 0 < len(failed) <= 3
    assert all("no drafts today" in str(a.error) for a in failed)
    for answer, want in zip(answers, wanted, strict=True):
        assert answer.finish_reason == "error" or answer.tokens == want
    drain(runs)


def test_generate_raises_what_a_step_raised_after_the_others_have_ended(
    make: Make, prompts: Any, wanted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runs = make(**N_GRAM | {"max_requests": 3})
    runs.model.register_forward_pre_hook(fail_at(4, RuntimeError("no text today")))
    with pytest.raises(RuntimeError, match="no text today"):
        runs.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert runs.stats().emitted >= NEW_TOKENS * (len(prompts) - 3)
    assert any(record.levelname == "ERROR" for record in caplog.records)


def test_an_abandoned_stream_is_aborted(make: Make, prompts: Any) -> None:
    runs = make(**N_GRAM)
    stream = runs.stream(prompts[2], SamplingParams(max_tokens=NEW_TOKENS))
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()


BAD_OPTIONS = [
    ({"drafter": "guess", "num_speculative_tokens": 3}, "drafter is 'guess'"),
    ({"drafter": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
    ({"drafter": None, "num_speculative_tokens": 2}, "num_speculative_tokens is 2"),
    ({"drafter": "ngram", "num_speculative_tokens": 8, "block_size": 8}, "block_size is 8"),
    ({"strategy": "hope"}, "strategy is 'hope'"),
    ({"max_requests": 0}, "max_requests is 0"),
    ({"max_model_len": 1}, "max_model_len is 1"),
    ({"max_tokens_per_step": 0}, "max_tokens_per_step is 0; .* at least 2"),
    (
        {"drafter": "ngram", "num_speculative_tokens": 3, "max_tokens_per_step": 3},
        "max_tokens_per_step is 3; .* at least 4",
    ),
    ({"conv_layout": "XY"}, "conv_layout is 'XY'"),
    ({"num_blocks": (0, 4)}, "num_blocks is 0"),
    ({"host_blocks": (4, 4), "prefix_caching": False}, "host_blocks is .* must be None"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[m for _, m in BAD_OPTIONS])
def test_bad_options_are_refused(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


LIST = "must be text or a list of token ids"
BAD_PROMPTS: list[tuple[object, str]] = [
    ([], "prompt is empty"),
    ("", "prompt is empty"),
    ([1, VOCABULARY], f"prompt holds token {VOCABULARY}"),
    ([1, -1], "prompt holds token -1"),
    ([1.5], "prompt holds token 1.5"),
    ([True], "prompt holds token True"),
    ([1] * 128, "prompt has 128 tokens"),
    (5, f"prompt is 5; it {LIST}"),
    (None, f"prompt is None; it {LIST}"),
    (b"t1 t2", f"prompt is a bytes; it {LIST}"),
    (torch.tensor([1, 2]), f"prompt is a Tensor; it {LIST}"),
    (np.ones((2, 2), np.int64), f"prompt is a ndarray; it {LIST}"),
    ({"prompt": "t1"}, f"prompt is a dict; it {LIST}"),
    ("t1 \udc80", r"prompt has '\\udc80' at 3; it must be text that UTF-8 can encode"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[m for _, m in BAD_PROMPTS])
def test_bad_prompts_are_refused_and_leave_nothing_behind(
    make: Make, prompts: Any, prompt: Any, message: str
) -> None:
    runs = make(**N_GRAM)
    for refused in (
        lambda: runs.generate([prompts[0], prompt]),
        lambda: runs.submit(prompt),
        lambda: next(runs.stream(prompt)),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    if message != "prompt has 128 tokens":  # which is not too long for an embedding
        with pytest.raises(ValueError, match=message):
            runs.embed([prompts[0], prompt])
    assert runs.stats().steps == 0


BAD_ARGUMENTS: list[tuple[dict[str, object], str]] = [
    ({"tenant": None}, "tenant is None; it must be a str"),
    ({"tenant": 7}, "tenant is 7; it must be a str"),
    ({"tenant": "\udc80"}, r"tenant has '\\udc80' at 0"),
    ({"deadline": float("nan")}, "deadline is nan; it must be None or seconds"),
    ({"deadline": -1}, "deadline is -1; it must be None or seconds"),
    ({"deadline": "1"}, "deadline is '1'; it must be None or seconds"),
    ({"deadline": True}, "deadline is True; it must be None or seconds"),
    ({"params": {"max_tokens": 4}}, "params is {'max_tokens': 4}; it must be SamplingParams"),
    ({"params": 0}, "params is 0; it must be SamplingParams"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=[m for _, m in BAD_ARGUMENTS])
def test_bad_arguments_stop_nobody_else(
    make: Make, prompts: Any, wanted: Any, arguments: Any, message: str
) -> None:
    runs = make(**N_GRAM)
    other = runs.submit(prompts[4], SamplingParams(max_tokens=NEW_TOKENS), deadline=float("inf"))
    runs.step()
    with pytest.raises(ValueError, match=message):
        runs.submit(prompts[3], **arguments)
    if "params" not in arguments:
        with pytest.raises(ValueError, match=message):
            runs.submit_embedding(prompts[3], **arguments)
    drain(runs)
    assert other.output == wanted[4]


@pytest.mark.parametrize("value", [None, 5, b"t1", {"t1": 1}, "t1", torch.ones(2, 2)], ids=repr)
def test_what_is_no_list_of_prompts_is_refused(make: Make, value: Any) -> None:
    runs = make()
    for act in (runs.generate, runs.embed):
        with pytest.raises(ValueError, match=r"prompts is .*; it must be a list of prompts"):
            act(value)


@pytest.mark.parametrize("params", [{}, 5, "x", [SamplingParams(), {}]], ids=repr)
def test_what_is_no_sampling_params_is_refused(make: Make, params: Any) -> None:
    runs = make()
    with pytest.raises(ValueError, match=r"params (is|has) .*must be SamplingParams"):
        runs.generate([[1], [2]], params)


def test_a_request_is_queued_once(make: Make, prompts: Any) -> None:
    runs = make()
    request = runs.submit(prompts[0])
    with pytest.raises(ValueError, match="request 0 was queued before"):
        runs.add(request)
    # Another engine's request is none of ours.
    make().abort(request)
    assert request.finish_reason is None
    runs.abort(request)


@pytest.mark.parametrize("most", [1, 2])
def test_generate_and_embed_feed_a_short_queue(
    make: Make, prompts: Any, wanted: Any, most: int
) -> None:
    runs = make(**N_GRAM | {"max_waiting": most, "max_requests": 2})
    answers = runs.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert [a.tokens for a in answers] == wanted
    assert len(runs.embed(prompts)) == len(prompts)
    waiting = [runs.submit(prompt) for prompt in prompts[:most]]
    with pytest.raises(QueueFull):
        runs.submit(prompts[0])
    for request in waiting:
        runs.abort(request)


def test_a_request_that_can_never_fit_is_refused_at_once(make: Make, prompts: Any) -> None:
    runs = make(**N_GRAM | {"num_blocks": (6, 40)})
    with pytest.raises(ValueError, match="needs 12 KV blocks; it must need at most 6"):
        runs.submit(prompts[7], SamplingParams(max_tokens=NEW_TOKENS))


def test_nothing_is_kept_free_for_requests_that_cannot_get_longer(make: Make) -> None:
    # 16 tokens, 2 of output, and 6 of drafts that may be written: three blocks from the start.
    runs = make(**N_GRAM | {"max_requests": 4, "num_blocks": (12, 40)})
    for first in range(4):
        runs.submit(list(range(first, first + 16)), SamplingParams(max_tokens=2, ignore_eos=True))
    runs.step()
    assert len(runs.scheduler.running) == 4
    drain(runs)
    assert runs.stats().preemptions == 0


def test_no_more_are_admitted_at_once_than_there_are_states_for(make: Make) -> None:
    # A request begins with K + 2 state blocks, which nobody has taken yet when the next is asked.
    few = {"max_requests": 4, "num_blocks": (80, 11), "state_layout": "columns"}
    runs = make(**N_GRAM | few)
    for first in range(4):
        runs.submit(list(range(first, first + 12)), SamplingParams(max_tokens=2, ignore_eos=True))
    runs.step()
    assert len(runs.scheduler.running) == 2
    assert runs.stats().preemptions == 0
    drain(runs)


def test_lists_of_parameters_must_match(make: Make, prompts: Any) -> None:
    runs = make()
    with pytest.raises(ValueError, match="params has 1 entries; it must have 2"):
        runs.generate(prompts[:2], [SamplingParams()])
