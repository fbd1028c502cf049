"""What changes a slot's logits: the last admission's, and nothing of the one before."""

import torch

from hybrid_runtime.specdecode.logit_tables import (
    FOREVER,
    MAX_BAD_WORD_TOKENS,
    MAX_END_TOKENS,
    Ban,
    Biases,
    TokenSets,
)
from hybrid_runtime.specdecode.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS

CPU = torch.device("cpu")


def test_a_slots_biases_and_bans_are_those_of_its_last_request() -> None:
    table = Biases(2, 1, CPU)
    table.admit([(1, {7: 0.5, 8: -1.0}, [Ban((3, 4)), Ban((5,), 9)])])
    assert table.bias_tokens[1, :3].tolist() == [7, 8, -1]
    assert table.bias[1, :2].tolist() == [0.5, -1.0]
    assert table.ban_until[1, :3].tolist() == [FOREVER, 9, 0]
    assert table.ban_end[1, :3].tolist() == [2, 3, 3]
    assert table.ban_tokens[1, :3].tolist() == [3, 4, 5]
    table.admit([(0, None, []), (1, {9: 2.0}, [Ban((6,), 4)])])
    assert table.bias_tokens[1, :3].tolist() == [9, -1, -1]
    assert table.bias[1, 0] == 2
    assert table.ban_until[1, :3].tolist() == [4, 0, 0]
    assert (table.ban_end[1] == 1).all()
    assert table.ban_tokens[1, 0] == 6
    assert (table.bias_tokens[0] == -1).all()
    assert not table.ban_until[0].any()


def test_the_most_bans_that_a_request_may_have_fit() -> None:
    """Each word as it is and behind a space, and every end."""
    table, words = Biases(1, 1, CPU), 2 * MAX_BAD_WORDS
    bans = [Ban((1,) * (MAX_BAD_WORD_TOKENS // words))] * words + [Ban((2,), 9)] * MAX_END_TOKENS
    table.admit([(0, dict.fromkeys(range(MAX_LOGIT_BIAS), 1.0), bans)])
    assert table.ban_end[0, -1] == MAX_BAD_WORD_TOKENS + MAX_END_TOKENS
    assert (table.ban_until[0, -1], table.ban_tokens[0, -1]) == (9, 2)


def test_a_slots_allowed_tokens_are_those_of_its_last_request() -> None:
    table = TokenSets(2, 40, 1, CPU, full=True)
    table.admit([(1, [0, 33])])
    assert table.bits.tolist() == [[-1, -1], [1, 2], [-1, -1]]
    table.admit([(1, None), (0, [31])])
    assert table.bits[:2].tolist() == [[-(1 << 31), 0], [-1, -1]]
