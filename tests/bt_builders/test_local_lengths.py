"""The vectorised local lengths are the layout's own."""

import pytest
import torch
from tests.support.plans import plan, plan_ranks

from bt_builders import local_lengths, local_lengths_of_ranks
from bt_builders.common import most_local_states
from bt_width import AttentionSpec, SlidingWindowSpec

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (2, 16), (3, 4), (4, 8)], ids=str)
def test_local_lengths_are_the_layouts(size: int, interleave: int) -> None:
    lengths = torch.arange(200, dtype=torch.int32)
    for layout in plan_ranks(AttentionSpec(block_size=16), 200, size, interleave=interleave):
        expected = [layout.local_length(length) for length in range(200)]

        assert local_lengths(lengths, layout).tolist() == expected


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 16), (3, 4)], ids=str)
def test_the_lengths_of_all_ranks_are_those_of_each(size: int, interleave: int) -> None:
    lengths = torch.arange(200, dtype=torch.int32)
    layouts = plan_ranks(AttentionSpec(block_size=16), 200, size, interleave=interleave)
    for layout in layouts:
        found = local_lengths_of_ranks(lengths, layout)

        assert found.dtype == torch.int32
        assert found.tolist() == [local_lengths(lengths, each).tolist() for each in layouts]
        assert found.sum(0).tolist() == lengths.tolist()


def test_lengths_of_a_replicated_group_stay() -> None:
    layout = plan(SlidingWindowSpec(block_size=16, window=64), 200, size=4)
    lengths = torch.tensor([7, 150], dtype=torch.int32)

    assert local_lengths(lengths, layout) is lengths


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_the_bound_is_the_longest_ranks(ratio: int) -> None:
    """Ranks that plan by it plan alike, and none of them needs more."""
    spec = AttentionSpec(block_size=16, tokens_per_state=ratio)
    layouts = plan_ranks(spec, 200, 3, interleave=4)
    for length in range(200):
        most = max(layout.local_length(length) // ratio for layout in layouts)
        bounds = {most_local_states(each.addressing, ratio, length) for each in layouts}

        assert bounds == {most}
