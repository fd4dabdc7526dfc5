"""The columns that a step touches, against the layout's own functions."""

from __future__ import annotations

import pytest
import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer.reference import reach_of
from bt_width import BlockTableLayout, MambaSpec, RingSpec, SlidingWindowSpec

pytestmark = pytest.mark.fast


def test_a_step_without_new_tokens_writes_no_state() -> None:
    spec = MambaSpec(block_size=16, mode="align", num_speculative_blocks=1)
    layout = BlockTableLayout.plan(spec, serving_limits(256))

    reach = reach_of(
        layout.addressing, torch.tensor([0, 16, 16, 17]), torch.tensor([0, 16, 17, 18])
    )

    assert reach.read_from.tolist() == [0, 0, 0, 1]
    assert reach.read_to.tolist() == [0, 1, 1, 2]
    assert reach.write_from.tolist() == [0, 0, 1, 1]
    assert reach.write_to.tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize(
    "spec", [RingSpec(block_size=16), MambaSpec(block_size=16)], ids=["ring", "states"]
)
def test_a_row_that_never_moves_on_is_touched_in_its_first_column(
    spec: RingSpec | MambaSpec,
) -> None:
    layout = BlockTableLayout.plan(spec, serving_limits(2**31 - 1))

    reach = reach_of(layout.addressing, torch.tensor([2**31 - 2]), torch.tensor([2**31 - 1]))

    assert (reach.read_from.item(), reach.write_from.item()) == (0, 0)
    assert (reach.read_to.item(), reach.write_to.item()) == (1, 1)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("window", [1, 4, 5, 9])
def test_a_window_is_read_from_the_block_of_its_first_visible_token(
    window: int, extra: int
) -> None:
    """At every edge of a block: a token less would let the first visible block be null."""
    spec = SlidingWindowSpec(block_size=4, window=window, extra_retained_tokens=extra)
    layout = BlockTableLayout.plan(spec, serving_limits(64))
    computed = torch.arange(1, 40)

    reach = reach_of(layout.addressing, computed, computed + 1)

    first_visible = [max(count - (window - 1) - extra, 0) for count in computed.tolist()]
    # a window of one token reads none of those computed: the step's own token is the first
    assert reach.read_from.tolist() == [layout.locate(token).column for token in first_visible]
