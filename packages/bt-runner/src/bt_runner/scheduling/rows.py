"""Which blocks a request's rows need for a step, and which they give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bt_runner.errors import BadInputError, RequestRefusedError
from bt_runner.scheduling.block_pool import BlockPool
from bt_runner.scheduling.request import Request
from bt_width import NULL_BLOCK, BlockTableLayout


@dataclass(frozen=True, slots=True)
class _Growth:
    """New columns at the end of a row: null ones, then blocks moved there, then fresh ones.

    Attributes:
        num_null: Null columns.
        moved: Columns whose blocks move to the end, and which become null.
        num_fresh: Blocks from the pool.
    """

    num_null: int
    moved: tuple[int, ...]
    num_fresh: int


class NullPrefix(NamedTuple):
    """Leading columns of a row that hold no block any more.

    Attributes:
        row: The row.
        group: The cache group.
        num_blocks: Blocks from the start of the row, in total.
    """

    row: int
    group: int
    num_blocks: int


class RequestRows:
    """Takes blocks for requests and gives them back, for all groups or none.

    Attributes:
        layouts: One per cache group.
        pools: One per cache group.
    """

    def __init__(self, layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]) -> None:
        """Make one pool per group.

        Raises:
            BadInputError: A pool is empty, or a group of states cannot hold a step's drafts.
        """
        self.layouts = tuple(layouts)
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        for layout in self.layouts:
            longest_decode = 1 + layout.limits.num_speculative_tokens
            if layout.kind == "mamba" and layout.block_size < longest_decode:
                raise BadInputError(
                    f"states are kept every {layout.block_size} tokens, and a decode step takes "
                    f"{longest_decode}: make the Mamba block size at least {longest_decode}",
                    block_size=layout.block_size,
                    longest_decode=longest_decode,
                )

    def require_room(self, request: Request) -> None:
        """Refuse a request that its groups' pools could not hold alone.

        Raises:
            RequestRefusedError: It says which pool, and how many blocks are missing.
        """
        for group, (layout, pool) in enumerate(zip(self.layouts, self.pools, strict=True)):
            longest = layout.num_blocks(request.max_len)
            needed = min(longest, layout.max_resident_blocks(layout.limits.max_num_batched_tokens))
            if needed > pool.capacity:
                raise RequestRefusedError(
                    f"request {request.request_id!r} needs {needed} blocks of group {group} for "
                    f"{request.max_len} tokens, and the pool has {pool.capacity} besides the null "
                    "block: shorten it or enlarge the pool",
                    group=group,
                    needed=needed,
                    capacity=pool.capacity,
                )

    def start(self, request: Request) -> None:
        """Begin a request's rows; none holds a block yet, unless a subclass knows some to share."""
        request.block_ids = [[] for _ in self.layouts]

    def extend(self, request: Request, seq_len: int) -> list[list[int]] | None:
        """Give a request what a step needs that leaves it with ``seq_len`` tokens.

        Returns:
            The ids to append, group by group. Where states moved along their row, all rows
            whole: they replace what stands there. None, and nothing is taken, where a pool
            has too few.
        """
        growths = [
            _growth(layout, held, request.num_computed, seq_len)
            for layout, held in zip(self.layouts, request.block_ids, strict=True)
        ]
        pairs = list(zip(self.pools, growths, strict=True))
        if any(growth.num_fresh > pool.num_free for pool, growth in pairs):
            return None
        new_ids = []
        for pool, growth, held in zip(self.pools, growths, request.block_ids, strict=True):
            moved = [held[column] for column in growth.moved]
            for column in growth.moved:
                held[column] = NULL_BLOCK
            ids = [NULL_BLOCK] * growth.num_null + moved + pool.allocate(growth.num_fresh)
            held.extend(ids)
            new_ids.append(ids)
        if any(growth.moved for growth in growths):
            return [list(held) for held in request.block_ids]
        return new_ids

    def trim(self, request: Request, *, last_step: int) -> list[NullPrefix]:
        """Give back the leading blocks that no later step reads, and name their columns."""
        prefixes = []
        for group, held in enumerate(request.block_ids):
            num_dead = min(self.layouts[group].num_expired_blocks(request.num_computed), len(held))
            dead = [block_id for block_id in held[:num_dead] if block_id != NULL_BLOCK]
            self.pools[group].release(dead, last_step=last_step)
            held[:num_dead] = [NULL_BLOCK] * num_dead
            if dead and request.row is not None:
                prefixes.append(NullPrefix(request.row, group, num_dead))
        return prefixes

    def release(self, request: Request, *, last_step: int) -> None:
        """Give back all blocks of a request."""
        for pool, held in zip(self.pools, request.block_ids, strict=True):
            pool.release([block for block in held if block != NULL_BLOCK], last_step=last_step)
        request.block_ids = []

    def recount(self, *, last_step: int) -> None:
        """Set the pools' books right when no request holds a block, whatever they said."""
        for group, pool in enumerate(self.pools):
            pool.recount(self.shared_blocks(group), last_step=last_step)

    def shared_blocks(self, group: int) -> Sequence[int]:
        """Return the blocks of a group that are held for no request, one for each reference."""
        return ()

    def complete(self, step: int) -> None:
        """Note that all steps up to ``step`` have ended."""
        for pool in self.pools:
            pool.complete(step)


def _growth(
    layout: BlockTableLayout, held: Sequence[int], num_computed: int, seq_len: int
) -> _Growth:
    end = layout.num_blocks(seq_len)
    if layout.kind != "mamba":
        return _Growth(0, (), max(end - len(held), 0))
    read, written = layout.state_column(num_computed), layout.state_column(seq_len)
    # between the state read and the one written lie drafts' states, which nobody wants any more
    skipped = range(read + 1, min(written, len(held)))
    moved = tuple(column for column in skipped if held[column] != NULL_BLOCK)
    num_null = max(written - len(held), 0)
    num_missing = max(end - len(held) - num_null, 0)
    return _Growth(num_null, moved[:num_missing], max(num_missing - len(moved), 0))
