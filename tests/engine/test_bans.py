"""Words, ends and tokens that a text must not have: the same with drafts as without."""

from typing import Any

import pytest
import torch
from helpers.small_engine import (
    DRAFTERS,
    NEW_TOKENS,
    VOCABULARY,
    Make,
    Script,
    drain,
    engine,
    with_graphs_and_without,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import NemotronHForCausalLM

from hybrid_runtime.demo import SHIPPED
from hybrid_runtime.engine import Completion, Engine, SamplingParams
from hybrid_runtime.engine.bans import bans

KINDS = "words", "ends", "allowed", "all"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Of words, with a space in front or without."""
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    return words


def spelled(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


def parts(text: list[int]) -> list[list[int]]:
    """Beginnings, middles and single tokens of a text."""
    return [text[:1], text[4:6], text[9:13], text[15:18]]


def asked(kind: str, text: list[int]) -> dict[str, Any]:
    """Parameters that forbid this text."""
    words: dict[str, Any] = {"bad_words": tuple(map(spelled, parts(text)))}
    ends: dict[str, Any] = {"min_tokens": 7, "stop_token_ids": (text[2], text[5], text[12], 500)}
    allowed: dict[str, Any] = {"allowed_token_ids": tuple(range(1, VOCABULARY, 3))}
    return {"words": words, "ends": ends, "allowed": allowed, "all": words | ends | allowed}[kind]


def check(params: SamplingParams, text: list[int], tokens: list[int]) -> None:
    """None of it is there."""
    if params.bad_words:
        assert not any(holds(tokens, part) for part in parts(text))
    if params.min_tokens:
        assert len(tokens) >= params.min_tokens
    if params.allowed_token_ids:
        assert set(tokens) <= set(params.allowed_token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_what_is_banned_is_the_likeliest_such(
    make: Make, hf: NemotronHForCausalLM, prompts: Any, wanted: Any, kind: str
) -> None:
    runs = make()
    for prompt, text in zip(prompts[2:5], wanted[2:5], strict=True):
        params = SamplingParams(max_tokens=NEW_TOKENS, **asked(kind, text))
        (plain,) = runs.generate([prompt], SamplingParams(max_tokens=NEW_TOKENS))
        assert plain.tokens == text
        assert all(holds(plain.tokens, part) for part in parts(text))
        (answer,) = runs.generate([prompt], params)
        check(params, text, answer.tokens)
        with torch.inference_mode():
            lines = hf(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
        output: list[int] = []
        # Outside of inference mode clones may be changed.
        for token, logits in zip(answer.tokens, lines.clone(), strict=True):
            if params.allowed_token_ids:
                kept = torch.full_like(logits, -torch.inf)
                index = torch.tensor(params.allowed_token_ids)
                logits = kept.index_copy(0, index, logits[index])
            if len(output) < params.min_tokens:
                logits[[t for t in params.stop_token_ids if t < VOCABULARY]] = -torch.inf
            for *before, last in parts(text) if params.bad_words else []:
                if output[len(output) - len(before) :] == before:
                    logits[last] = -torch.inf
            best = logits.topk(2)
            assert token == best.indices[0] or best.values[0] - best.values[1] < 1e-4
            output.append(token)


@pytest.fixture(scope="module", params=[0.0, 0.9])
def alone(
    request: pytest.FixtureRequest, hf: NemotronHForCausalLM, tokenizer: Tokenizer, prompts: Any
) -> tuple[list[SamplingParams], list[Completion]]:
    """What five prompts ask for at this temperature, the first one nothing, and what each gets."""
    how = [{"max_tokens": NEW_TOKENS, "temperature": request.param, "seed": i} for i in range(5)]
    runs, chosen = engine(hf, tokenizer, prefix_caching=False), prompts[1:6]
    plain = runs.generate(chosen, [SamplingParams(**h) for h in how])
    params = [SamplingParams(**how[0])]
    for i, kind in enumerate(KINDS):
        params.append(SamplingParams(**how[i + 1], **asked(kind, plain[i + 1].tokens)))
    found = [runs.generate([p], one)[0] for p, one in zip(chosen, params, strict=True)]
    assert found[0].tokens == plain[0].tokens
    for one, free, answer in zip(params[1:], plain[1:], found[1:], strict=True):
        assert answer.tokens != free.tokens
        check(one, free.tokens, answer.tokens)
    return params, found


@DRAFTERS
def test_drafts_bring_nothing_that_is_banned(
    make: Make, prompts: Any, options: Any, alone: tuple[list[SamplingParams], list[Completion]]
) -> None:
    """The same text as alone, beside requests that forbid other things or nothing, in slots that
    others had before."""
    chosen, (params, answers) = prompts[1:6], alone
    runs = make(**options)
    if options["drafter"] == "ngram":  # half of all drafts are right, whatever the text
        texts = [p + a.tokens for p, a in zip(chosen, answers, strict=True)]
        runs.runner.drafter = Script(texts, 3, [3, 0, 2, 1, 3])
    runs.capture()
    order = [0, 1, 2, 3, 4, 4, 3, 0, 2, 1, 0, 0]
    together = runs.generate([chosen[i] for i in order], [params[i] for i in order])
    assert [answer.tokens for answer in together] == [answers[i].tokens for i in order]


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_is_kept_from_the_same(
    make: Make, prompts: Any, wanted: Any, kind: str
) -> None:
    runs = make(steps_ahead=1)
    params = SamplingParams(max_tokens=NEW_TOKENS, **asked(kind, wanted[4]))
    (answer,) = runs.generate([prompts[4]], params)
    request = runs.submit(prompts[4], params)
    for known in (2, 5, 8):
        while len(request.output) < known:
            runs.step()
        runs.scheduler.preempt(request)
    while request.finish_reason is None:
        runs.step()
    assert request.output == answer.tokens
    drain(runs)


def test_no_end_of_text_comes_before_the_least_tokens(
    make: Make, prompts: Any, wanted: Any
) -> None:
    """Unless it is ignored, and then it is a token as any other."""
    runs = make()
    first = wanted[4][3]
    runs.core.eos = frozenset([first, wanted[4][9], VOCABULARY + 3])
    text = runs.generate([prompts[4]], SamplingParams(max_tokens=NEW_TOKENS))[0]
    assert len(text.tokens) == wanted[4].index(first)
    least = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS)
    later = runs.generate([prompts[4]], least)[0]
    assert len(later.tokens) == NEW_TOKENS
    assert not runs.core.eos & set(later.tokens)
    on = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True)
    assert runs.generate([prompts[4]], on)[0].tokens == wanted[4]


def test_stop_strings_wait_for_the_least_tokens_and_may_be_kept(
    make: Make, prompts: Any, wanted: Any
) -> None:
    runs = make()
    whole = "".join(f" t{token}" for token in wanted[4])
    stop = f"t{wanted[4][5]}"
    (plain,) = runs.generate([prompts[4]], SamplingParams(max_tokens=NEW_TOKENS, stop=(stop,)))
    assert plain.finish_reason == "stop"
    assert len(plain.tokens) == wanted[4].index(wanted[4][5]) + 1
    for least in range(len(plain.tokens) + 2):
        params = SamplingParams(
            max_tokens=NEW_TOKENS, stop=(stop, "t0 never"), min_tokens=least,
            include_stop_str_in_output=True,
        )  # fmt: skip
        (answer,) = runs.generate([prompts[4]], params)
        # A string that was complete by then ends nothing.
        begins = len("".join(f" t{token}" for token in wanted[4][:least]))
        at = whole.find(stop, max(begins - len(stop) + 1, 0))
        if at < 0:
            assert (answer.text, answer.finish_reason) == (whole, "length")
        else:
            assert (answer.text, answer.finish_reason) == (whole[: at + len(stop)], "stop")
            assert len(answer.tokens) > least
        assert "".join(runs.stream(prompts[4], params)) == answer.text
    kept = SamplingParams(
        max_tokens=NEW_TOKENS, stop_token_ids=(wanted[4][5],), include_stop_str_in_output=True,
        logprobs=0,
    )  # fmt: skip
    (answer,) = runs.generate([prompts[4]], kept)
    assert answer.tokens == plain.tokens
    assert answer.text == "".join(f" t{token}" for token in plain.tokens)
    assert len(answer.logprobs or []) == len(plain.tokens)


def test_special_tokens_are_in_the_text_if_asked_for(make: Make, prompts: Any, wanted: Any) -> None:
    special = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    special.add_special_tokens([f"t{wanted[4][5]}"])
    runs = make(tokenizer=special)
    params = (
        SamplingParams(max_tokens=NEW_TOKENS),
        SamplingParams(max_tokens=NEW_TOKENS, skip_special_tokens=False),
    )
    without, kept = (runs.generate([prompts[4]], one)[0] for one in params)
    assert without.tokens == kept.tokens == wanted[4]
    assert kept.text.split() == [f"t{token}" for token in wanted[4]]
    assert without.text.split() == [f"t{t}" for t in wanted[4] if t != wanted[4][5]]


def test_words_are_banned_with_a_space_in_front_and_without() -> None:
    """As the shipped tokenizer writes them, which has a token for each."""
    runs = Engine.from_pretrained(SHIPPED, device="cpu", drafter=None)
    assert runs.tokenizer is not None
    prompt = "class Stack:\n    def pop(self):\n"
    (plain,) = runs.generate([prompt], SamplingParams(max_tokens=32))
    for word in ("return", "self"):
        assert word in plain.text
        none = SamplingParams(max_tokens=32, bad_words=(word,))
        bare, spaced = (
            runs.tokenizer.encode(space + word, add_special_tokens=False).ids for space in ("", " ")
        )
        (answer,) = runs.generate([prompt], none)
        assert not holds(answer.tokens, bare)
        assert not holds(answer.tokens, spaced)
        assert bare != spaced


def test_white_space_is_banned_as_it_stands() -> None:
    runs = Engine.from_pretrained(SHIPPED, device="cpu", drafter="ngram")
    prompt = "class Stack:\n    def pop(self):\n"
    words = ((), ("\n",), (" self",), (" ",))
    params = [SamplingParams(max_tokens=48, bad_words=banned) for banned in words]
    plain, *texts = (answer.text for answer in runs.generate([prompt] * 4, params))
    for (word,), text in zip(words[1:], texts, strict=True):
        assert word in plain
        assert word not in text
        assert "s" in text


def test_what_is_allowed_may_not_be_the_end_of_a_ban() -> None:
    """Else a text could come to where nothing can be drawn."""
    runs = Engine.from_pretrained(SHIPPED, device="cpu", drafter=None)
    params = SamplingParams(max_tokens=4, allowed_token_ids=(115,), bad_words=("ss",))
    with pytest.raises(ValueError, match=r"^allowed_token_ids is \(115,\); it must have a token"):
        runs.submit("class", params)
    every = SamplingParams(max_tokens=4, bad_words=tuple(chr(i) for i in range(128)))
    runs.submit("class", every)


def test_words_of_tokens_that_the_model_does_not_have_need_no_ban(tokenizer: Tokenizer) -> None:
    params = SamplingParams(bad_words=(f"t{VOCABULARY - 2}", f"t{VOCABULARY - 1}"))
    found = bans(params, 0, tokenizer, (), VOCABULARY - 1)
    assert [ban.tokens for ban in found] == [(VOCABULARY - 2,)]


def test_a_minimum_that_bans_nothing_changes_no_logits(make: Make) -> None:
    """Else every step of the whole batch would copy its logits to float32."""
    runs = make(tokenizer=None)
    params = SamplingParams(max_tokens=8, min_tokens=8, ignore_eos=True)
    request = runs.submit([5, 6, 7], params)
    assert request.bans == ()
    assert not params.adjusts
    while request.finish_reason is None:
        runs.step()
    assert len(request.output) == 8


def test_a_word_that_the_tokenizer_does_not_know_is_refused(make: Make) -> None:
    runs = make(tokenizer=Tokenizer(WordLevel({"t0": 0}, unk_token="none")))
    with pytest.raises(ValueError, match=r"^bad_words is not what the tokenizer can encode: "):
        runs.submit([5, 6, 7], SamplingParams(max_tokens=4, bad_words=("t1",)))


def test_what_cannot_be_kept_is_refused(make: Make, tokenizer: Tokenizer, prompts: Any) -> None:
    runs = make()
    runs.core.eos = frozenset([3])
    for wrong, message in (
        ({"allowed_token_ids": (5, 96)}, r"^allowed_token_ids is \(5, 96\), must be .* 0\.\.95"),
        ({"allowed_token_ids": (3,), "min_tokens": 1}, r"^allowed_token_ids is \(3,\); it must"),
        ({"allowed_token_ids": (5,), "bad_words": ("t5",)}, "^allowed_token_ids is"),
        ({"allowed_token_ids": (5,), "bad_words": ("t4t5", "t5")}, "^allowed_token_ids is"),
        ({"allowed_token_ids": (5,), "stop_token_ids": (5,), "min_tokens": 2}, "^allowed_token"),
        ({"bad_words": ("\ud800",)}, "^bad_words has "),
        ({"bad_words": tuple(f"t{i}" for i in range(96))}, "^bad_words end with 96 tokens"),
        ({"bad_words": tuple(f"t{i} " * 40 for i in range(26))}, "^bad_words has 1040 tokens"),
    ):
        params = SamplingParams(max_tokens=4, **wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            runs.submit(prompts[0], params)
    without = make(tokenizer=None)
    with pytest.raises(ValueError, match=r"^bad_words is text"):
        without.submit(prompts[0], SamplingParams(bad_words=("t1",)))
    assert runs.idle


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_keep_the_same_from_being_drawn() -> None:
    """Tables that are made after graphs were captured count for the next steps."""
    kinds: list[dict[str, Any]] = [
        {}, {"presence_penalty": 1.0}, {"bad_words": ("return", "self.", "import os")},
        {"min_tokens": 30, "stop_token_ids": tuple(range(90))},
        {"allowed_token_ids": tuple(range(5, 300))}, {"prompt_logprobs": 2},
        {"prompt_logprobs": 2, "max_tokens": 0},
    ]  # fmt: skip
    params = [
        SamplingParams(**{"max_tokens": 40, "temperature": 0.8 * (i % 2), "seed": i} | kind)
        for i, kind in enumerate(kinds)
    ]
    for with_graphs, without in with_graphs_and_without(params):
        assert with_graphs.tokens == without.tokens
        for a, b in zip(
            with_graphs.prompt_logprobs or [], without.prompt_logprobs or [], strict=True
        ):
            assert a is b is None or abs(a.logprob - b.logprob) < 1e-4  # type: ignore[union-attr]
