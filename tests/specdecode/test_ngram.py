"""Prompt look-up against a plain Python search."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_runtime.specdecode.ngram import propose


def oracle(text: list[int], num_draft: int, max_ngram: int, min_ngram: int) -> list[int]:
    for size in range(max_ngram, min_ngram - 1, -1):
        ending = text[len(text) - size :] if size <= len(text) else None
        found = [
            text[start + size :][:num_draft]
            for start in range(len(text) - size)
            if text[start : start + size] == ending
        ]
        if found:
            most = max(len(followers) for followers in found)
            best = [followers for followers in found if len(followers) == most][-1]
            return best + [-1] * (num_draft - most)
    return [-1] * num_draft


def batch(texts: list[list[int]], width: int, filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    history = torch.full((len(texts), width), filler, dtype=torch.int32)
    for row, text in zip(history, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int32)
    return history, torch.tensor([len(text) for text in texts], dtype=torch.int32)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    # Three tokens, so that occurrences are many and overlap.
    st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=4),
    st.integers(0, 5) | st.just(15),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(-1, 2),
)
def test_equals_a_plain_search(
    texts: list[list[int]], num_draft: int, min_ngram: int, more: int, spare: int, filler: int
) -> None:
    # What lies beyond a row's length may look like text and must not be read.
    width = max(len(text) for text in texts) + spare
    history, length = batch(texts, width, filler)
    untouched = history.clone()
    got = propose(history, length, num_draft, min_ngram + more, min_ngram)
    assert got.dtype == torch.int32
    assert got.tolist() == [oracle(t, num_draft, min_ngram + more, min_ngram) for t in texts]
    assert torch.equal(history, untouched)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], [-1, -1, -1]),
        ([7], [-1, -1, -1]),
        ([1, 2, 3], [-1, -1, -1]),
        ([5, 6, 7, 8, 5], [6, 7, 8]),
        ([5, 9, 5, 6, 7, 8, 5], [6, 7, 8]),  # the later of two
        ([1, 5, 6, 6, 6, 2, 5, 7, 7, 7, 1, 5], [6, 6, 6]),  # the longer before the later
        ([4, 4, 4, 4, 4, 4, 4, 4], [4, 4, 4]),  # not the one with a single follower
        ([3, 9, 3], [9, 3, -1]),
    ],
)
def test_examples(text: list[int], expected: list[int]) -> None:
    history, length = batch([text], 12, 0)
    assert propose(history, length, 3).tolist() == [expected]


def test_rows_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 4, (64, 200), generator=generator).int()
    length = torch.randint(0, 201, (64,), generator=generator).int()
    whole = propose(history, length, 4)
    for row in range(0, 64, 7):
        alone = propose(history[row : row + 1, : length[row]], length[row : row + 1], 4)
        assert torch.equal(alone[0], whole[row])


def test_wrong_input_is_refused() -> None:
    history, length = batch([[1, 2]], 4, 0)
    with pytest.raises(ValueError, match=r"history is torch.int64 \[1, 4\], must be int32"):
        propose(history.long(), length, 3)
    with pytest.raises(ValueError, match=r"length is torch.int32 \[2\], must be int32 \[1\]"):
        propose(history, length.repeat(2), 3)
    with pytest.raises(ValueError, match=r"length is torch.int64 \[1\], must be int32 \[1\]"):
        propose(history, length.long(), 3)
    with pytest.raises(ValueError, match="num_draft is -1, must be at least 0"):
        propose(history, length, -1)
    for bounds in ((4, 0), (2, 3)):
        with pytest.raises(ValueError, match=f"min_ngram is {bounds[1]} and max_ngram {bounds[0]}"):
            propose(history, length, 3, *bounds)


def test_nothing_depends_on_the_data() -> None:
    # Meta tensors have no values: any host read or data-dependent shape raises.
    with torch.device("meta"):
        got = propose(torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), 3)
    assert got.shape == (2, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_in_a_cuda_graph() -> None:
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 4, (64, 200), generator=generator).int()
    length = torch.randint(0, 100, (64,), generator=generator).int()
    history_device, length_device = history.cuda(), length.cuda()
    propose(history_device, length_device, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = propose(history_device, length_device, 4)
    for more in (0, 90):
        length_device.copy_(length + more)
        graph.replay()
        assert torch.equal(got.cpu(), propose(history, length + more, 4))
