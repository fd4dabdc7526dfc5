"""Steps of one group at the edges of what a check looks at."""

from __future__ import annotations

import torch
from tests.support.plans import serving_limits

from bt_tables.sanitizer.shapes import ShapeChecks
from bt_tables.sanitizer.step import CacheGroup, CheckedStep, read_arguments
from bt_width import NULL_BLOCK, AttentionSpec, BlockTableLayout, SlidingWindowSpec

NUM_BLOCKS = 400


def long_rows() -> BlockTableLayout:
    """A group of 128 columns, one block each."""
    limits = serving_limits(512, max_num_reqs=1, max_num_batched_tokens=1)
    return BlockTableLayout.plan(AttentionSpec(block_size=4), limits)


def short_window(window: int, extra: int) -> BlockTableLayout:
    """A group whose tokens see ``window`` tokens, in blocks of four."""
    limits = serving_limits(64, max_num_reqs=1, max_num_batched_tokens=1)
    spec = SlidingWindowSpec(block_size=4, window=window, extra_retained_tokens=extra)
    return BlockTableLayout.plan(spec, limits)


def decode_step(
    layout: BlockTableLayout, length: int, *, num_null: int = 0, stale: int | None = None
) -> CheckedStep:
    """Return a step that writes a request's last token.

    Args:
        layout: The group.
        length: The request's tokens.
        num_null: The leading blocks that are null.
        stale: A column past the row that holds an id.
    """
    blocks = list(range(1, 1 + layout.num_blocks(length)))
    blocks[:num_null] = [NULL_BLOCK] * num_null
    ids = layout.expand(blocks)
    table = torch.zeros(1, layout.width, dtype=torch.int32)
    table[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    if stale is not None:
        table[0, stale] = 300
    groups = [CacheGroup(layout.addressing, NUM_BLOCKS)]
    arguments = read_arguments(
        groups,
        [table],
        torch.tensor([[layout.slot(length - 1, ids)]]),
        seq_lens=torch.tensor([length]),
        query_start_loc=torch.tensor([0, 1]),
        num_blocks_of_row=torch.tensor([[len(blocks)]]),
        ref_counts=None,
        ref_blocks=None,
    )
    step, findings = ShapeChecks(groups, 1, 1, fixed_addresses=False).check(arguments)
    assert not findings
    return step
