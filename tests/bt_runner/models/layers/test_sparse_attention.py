"""The lightning indexer's scores and choices."""

import pytest
import torch

from bt_runner.models.layers.sparse_attention import NOTHING, IndexQuery, choose, score


def test_scores_are_weighted_sums_of_rectified_products() -> None:
    """The relu stands inside the sum over heads; weights may be negative."""
    heads = torch.tensor([[[[1.0, 0.0], [-1.0, 2.0]]]])
    weights = torch.tensor([[[2.0, -3.0]]])
    keys = torch.tensor([[[1.0, 1.0], [-4.0, 0.0], [3.0, 0.0]]])
    assert score(IndexQuery(heads, weights), keys).tolist() == [[[-1.0, -12.0, 6.0]]]


@pytest.mark.parametrize(
    ("scores", "visible", "chosen"),
    [
        pytest.param([3, 1, 2, 5], "1111", [0, 3], id="best"),
        pytest.param([3, 1, 2, 5], "1110", [0, 2], id="only-visible"),
        pytest.param([7, 7, 7, 7], "1111", [0, 1], id="ties-go-low"),
        pytest.param([1, 7, 7, 9], "1111", [1, 3], id="tie-at-the-border"),
        pytest.param([0, 0, 0, 0], "0101", [1, 3], id="ties-among-visible"),
        pytest.param([5, 5, 5, 5], "0100", [1, NOTHING], id="too-few"),
        pytest.param([5, 5, 5, 5], "0000", [NOTHING, NOTHING], id="none"),
    ],
)
def test_the_best_visible_columns_are_chosen(
    scores: list[float], visible: str, chosen: list[int]
) -> None:
    """In rising order; of equal scores the lower column wins."""
    hidden = torch.tensor([[letter == "0" for letter in visible]])
    known = torch.tensor([scores]).double().masked_fill(hidden, -torch.inf)
    assert choose(known, 2).tolist() == [chosen]


@pytest.mark.parametrize("topk", [4, 9], ids=["as-many", "more"])
def test_all_visible_columns_are_chosen_where_they_are_few(topk: int) -> None:
    """The answer is no wider than there are columns."""
    found = choose(torch.tensor([[0.0, -torch.inf, 0.0, 0.0]]), topk)
    assert found.tolist() == [[0, 2, 3, NOTHING]]
