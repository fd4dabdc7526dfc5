"""Short ways to plan a layout, for tests that vary one or two of its causes."""

from collections.abc import Iterable

from bt_width import BlockTableLayout, CacheSpec, ContextParallel, ServingLimits


def serving_limits(
    max_model_len: int,
    *,
    max_num_reqs: int = 4,
    max_num_batched_tokens: int = 64,
    num_speculative_tokens: int = 0,
    lookahead_tokens: int = 0,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> ServingLimits:
    """Limits of a small server; only the longest request has to be said."""
    return ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_speculative_tokens=num_speculative_tokens,
        lookahead_tokens=lookahead_tokens,
        context_parallel=ContextParallel(size=size, rank=rank, interleave=interleave),
    )


def plan(
    spec: CacheSpec,
    max_model_len: int,
    *,
    kernel_block_size: int | None = None,
    lookahead_tokens: int = 0,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> BlockTableLayout:
    """The layout of one group on one rank."""
    limits = serving_limits(
        max_model_len,
        lookahead_tokens=lookahead_tokens,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    return BlockTableLayout.plan(spec, limits, kernel_block_size)


def plan_ranks(
    spec: CacheSpec,
    max_model_len: int,
    size: int,
    *,
    interleave: int = 1,
    kernel_block_size: int | None = None,
) -> list[BlockTableLayout]:
    """The layouts of one group on every rank of a context-parallel server."""
    return [
        plan(
            spec,
            max_model_len,
            kernel_block_size=kernel_block_size,
            size=size,
            rank=rank,
            interleave=interleave,
        )
        for rank in range(size)
    ]


def slots(
    layout: BlockTableLayout, positions: Iterable[int], block_ids: Iterable[int]
) -> list[int]:
    """The slots of positions in a row that is given as blocks."""
    kernel_block_ids = layout.expand(list(block_ids))
    return [layout.slot(position, kernel_block_ids) for position in positions]
