"""What the sanitizer computes of a layout equals the layout's own functions."""

from __future__ import annotations

import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer.plans import GroupPlan, reach_of
from bt_width import MAX_POSITION, AttentionSpec, BlockTableLayout, MambaSpec

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (3, 1), (3, 4), (4, 16)], ids=str)
def test_local_lengths_are_the_layouts(size: int, interleave: int) -> None:
    lengths = torch.arange(200)
    for rank in range(size):
        limits = serving_limits(256, size=size, rank=rank, interleave=interleave)
        layout = BlockTableLayout.plan(AttentionSpec(block_size=16), limits)

        found = GroupPlan.of(layout, 100).local_length(lengths)

        assert found.tolist() == [layout.local_length(length) for length in range(200)]


@pytest.mark.parametrize("spec", [AttentionSpec(block_size=16), MambaSpec(block_size=16)], ids=str)
def test_a_distance_that_is_never_reached_is_past_every_position(
    spec: AttentionSpec | MambaSpec,
) -> None:
    plan = GroupPlan.of(BlockTableLayout.plan(spec, serving_limits(256)), 100)

    distances = (plan.visible_tokens, plan.tokens_per_state)

    assert distances == (MAX_POSITION + 1,) * 2
    assert {type(distance) for distance in distances} == {int}


def test_a_step_without_new_tokens_writes_no_state() -> None:
    spec = MambaSpec(block_size=16, mode="align", num_speculative_blocks=1)
    plan = GroupPlan.of(BlockTableLayout.plan(spec, serving_limits(256)), 100)

    reach = reach_of(plan, torch.tensor([0, 16, 16, 17]), torch.tensor([0, 16, 17, 18]))

    assert reach.read_from.tolist() == [0, 0, 0, 1]
    assert reach.read_to.tolist() == [0, 1, 1, 2]
    assert reach.write_from.tolist() == [0, 0, 1, 1]
    assert reach.write_to.tolist() == [0, 0, 3, 3]
