"""Positions spread over ranks, and scores and attention put together again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bt_runner.models.layers.mla import attend
from bt_runner.models.sharding import Sharding, SingleRank
from bt_width import AttentionSpec, BlockTableLayout, ContextParallel, ServingLimits

SPLITS = [(1, 1), (2, 1), (2, 4), (3, 2), (4, 16)]


class Together:
    """Ranks of one process: each lays down what it gathers, and finds what all laid down."""

    def __init__(self, size: int, rank: int, board: list[list[Tensor]]) -> None:
        self.size = size
        self.rank = rank
        self._board = board

    def gather(self, values: Tensor) -> Tensor:
        return torch.stack([of_rank.pop(0) for of_rank in self._board])

    def gather_texts(self, text: str) -> list[str]:
        return [text] * self.size


@pytest.mark.parametrize(("size", "interleave"), SPLITS)
def test_places_are_those_of_the_contract(size: int, interleave: int) -> None:
    """Owner and place of every position, for every rank.

    Reported as https://github.com/vllm-project/vllm/pull/26696
    """
    positions = torch.arange(200)
    place = Sharding(Together(size, 0, []), interleave).place(positions)
    for position in positions.tolist():
        context = ContextParallel(size=size, rank=0, interleave=interleave)
        limits = ServingLimits(
            max_model_len=256, max_num_reqs=1, max_num_batched_tokens=8, context_parallel=context
        )
        layout = BlockTableLayout.plan(AttentionSpec(block_size=interleave * 2), limits)
        rank, column, offset = layout.locate(position)
        assert int(place.rank[position]) == rank
        assert int(place.local[position]) == column * layout.block_size + offset


def _shares(size: int, interleave: int, length: int) -> list[Tensor]:
    """The positions that each rank keeps, in order."""
    positions = torch.arange(length)
    owners = Sharding(Together(size, 0, []), interleave).place(positions).rank
    return [positions[owners == rank] for rank in range(size)]


@pytest.mark.parametrize(("size", "interleave"), SPLITS[1:])
@pytest.mark.parametrize("length", [1, 5, 37])
def test_scores_come_back_in_the_order_of_positions(
    size: int, interleave: int, length: int
) -> None:
    """Also where a rank keeps none of them, and nothing is seen past the last."""
    shares = _shares(size, interleave, length)
    width = max(map(len, shares)) + 2
    scores = torch.full((size, 2, width), -torch.inf)
    for rank, kept in enumerate(shares):
        scores[rank, :, : len(kept)] = torch.stack((kept, kept + 100))
    sharding = Sharding(Together(size, 1, [[each] for each in scores]), interleave)
    found = sharding.in_order(scores[1], length + 3)
    assert found[0, :length].tolist() == list(range(length))
    assert found[1, :length].tolist() == list(range(100, 100 + length))
    assert (found[:, length:] == -torch.inf).all()


def test_scores_in_a_line_come_back_from_where_each_request_begins() -> None:
    """The last request ends with the line: what it does not reach is not its neighbour's."""
    scores = torch.tensor([[0.0, 1.0, 2.0, -torch.inf, -torch.inf], [-torch.inf] * 3 + [7.0, 8.0]])
    found = Sharding(SingleRank(), 1).in_order(scores, 4, torch.tensor([[0], [3]]))
    inf = float("inf")
    assert found.tolist() == [[0.0, 1.0, 2.0, -inf], [7.0, 8.0, -inf, -inf]]


@pytest.mark.parametrize(("size", "interleave"), SPLITS)
@pytest.mark.parametrize("length", [1, 5, 37])
def test_ranks_attend_together_as_one_would(size: int, interleave: int, length: int) -> None:
    """A rank that keeps no token weighs nothing."""
    draw = torch.Generator().manual_seed(length)
    query = torch.randn(1, 2, 3, 6, generator=draw, dtype=torch.float64)
    rows = torch.randn(1, length, 6, generator=draw, dtype=torch.float64)
    whole = attend(query, rows, torch.ones(1, 2, length) > 0, latent_dim=4, scale=0.3)
    parts = []
    for kept in _shares(size, interleave, length):
        own = torch.cat((rows[:, kept], torch.full((1, 1, 6), torch.nan).double()), dim=1)
        visible = (torch.arange(own.shape[1]) < len(kept)).expand(1, 2, -1)
        parts.append(attend(query, own, visible, latent_dim=4, scale=0.3))
    board = [[part.values, part.log_weight] for part in parts]
    found = Sharding(Together(size, 0, board), interleave).merge(parts[0])
    torch.testing.assert_close(found.values, whole.values)
