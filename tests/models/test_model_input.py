"""The input of a forward pass: where its tokens are, however the arguments say it, and their move to the front."""

import pytest
import torch

from shardwise.core.sequence_view import SequenceView
from shardwise.models.model_input import ModelInput, positions_of

S = 5
LENGTHS = torch.tensor([3, 5, 0])
IS_TOKEN = torch.arange(S) < LENGTHS.unsqueeze(1)


def batch(mask: torch.Tensor | None = None, **arguments: torch.Tensor) -> ModelInput:
    ids = torch.arange(3 * S).view(3, S)
    return ModelInput.of(SequenceView(S), 3, ids, None, mask, ids + 100, **arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"mask": IS_TOKEN.long()}, IS_TOKEN),
        ({"lengths": LENGTHS}, IS_TOKEN),
        ({"documents": IS_TOKEN.long() - 1}, IS_TOKEN),
        # A mask is read first.
        ({"mask": IS_TOKEN.flip(1), "lengths": LENGTHS}, IS_TOKEN.flip(1)),
        ({"mask": torch.zeros(3, 1, S, S, dtype=torch.bool)}, None),
    ],
    ids=["mask", "lengths", "documents", "mask and lengths", "mask of pairs"],
)
def test_known_tokens(arguments, expected):
    found = batch(**arguments).known_tokens(torch.device("cpu"))
    assert found is None if expected is None else torch.equal(found, expected)


def test_tokens_move_to_the_front_and_results_back():
    given = batch(IS_TOKEN.flip(1))
    first = given.tokens_first()
    assert torch.equal(first.tokens, IS_TOKEN)
    assert first.ids[0].tolist() == [2, 3, 4, 0, 1]
    assert first.labels[0].tolist() == [102, 103, 104, 100, 101]
    # Positions are still those that the model counts without a mask.
    assert first.positions[0].tolist() == [2, 3, 4, 0, 1]
    assert torch.equal(first.moved.move_back(first.ids), given.ids)
    assert torch.equal(first.moved.move_sequence_back(first.ids.t().unsqueeze(-1)).squeeze(-1).t(), given.ids)
    assert first.attention_mask(None, counts_tokens=True).is_plain
    assert not given.attention_mask(None, counts_tokens=True).is_plain


def test_tokens_stay_where_documents_are_given():
    given = batch(IS_TOKEN.flip(1), documents=torch.zeros(3, S, dtype=torch.int64))
    assert given.tokens_first() is given


def test_default_positions_that_skip_padding():
    skipping = ModelInput.of(SequenceView(S), 3, None, None, IS_TOKEN.flip(1), None, skips_padding=True)
    assert torch.equal(skipping.positions, positions_of(IS_TOKEN.flip(1)))
