"""Allocates and frees the blocks of every cache group, and keeps which row holds which.

It knows rows and numbers of tokens, no requests and no tensors. A call takes many rows and
costs a handful of array operations for each group, whatever their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bt_runner.arguments import as_list, require_int
from bt_runner.arrays import Flags, Ints, Tokens, ragged
from bt_runner.block_pool import BlockPool
from bt_runner.errors import BadInputError, RequestRefusedError
from bt_runner.prefix_cache import PrefixCache, PrefixHashes
from bt_runner.requests import Request, RunningRequests
from bt_tables import StagedBlockTables
from bt_width import NULL_BLOCK, BlockTableLayout
from bt_width.errors import counted
from bt_width.layout import MAX_POSITION


@dataclass(frozen=True, slots=True)
class _Before:
    """Columns that rows gain before their fresh blocks: null ones, then blocks moved there.

    Attributes:
        num_null: [M]; null columns of each.
        moved: [M, K]; whether the row's block in the K-th column after the one it reads
            moves to its end; what moves leaves a null column behind.
        first_moved: [M]; the column that ``moved`` begins with.
    """

    num_null: Ints
    moved: Flags
    first_moved: Ints

    def first(self, count: int) -> _Before:
        """Return those of the leading rows."""
        return _Before(self.num_null[:count], self.moved[:count], self.first_moved[:count])


@dataclass(frozen=True, slots=True)
class _Growth:
    """New columns at the end of rows.

    Attributes:
        places: [M]; which of the rows grow, as indices into those that were asked about.
        num_fresh: [M]; blocks from the pool.
        before: What stands before those; None where nothing does.
    """

    places: Ints
    num_fresh: Ints
    before: _Before | None

    def num_fitting(self, num_free: int, num_rows: int) -> int:
        """Return how many leading rows ``num_free`` blocks are enough for."""
        if self.num_fresh.sum() <= num_free:
            return num_rows
        num_served = int(self.num_fresh.cumsum().searchsorted(num_free, side="right"))
        return int(self.places[num_served])

    def first(self, num_rows: int) -> _Growth:
        """Return the growth of the leading rows."""
        count = int(self.places.searchsorted(num_rows))
        if count == len(self.places):
            return self
        before = None if self.before is None else self.before.first(count)
        return _Growth(self.places[:count], self.num_fresh[:count], before)


class GroupBlocks:
    """One cache group: its pool, and the blocks of each row (R).

    Attributes:
        layout: The group's plan.
        pool: Its blocks.
        held: [R]; columns of each row, null ones included.
        num_null: [R]; leading columns of each row whose blocks were given back.
        block_ids: [R, blocks per row] int32; what the columns hold, up to ``held``.
    """

    def __init__(self, layout: BlockTableLayout, num_blocks: int) -> None:
        """Start with every block free."""
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        addressing = layout.addressing
        num_rows = layout.limits.max_num_reqs
        self.held: Ints = np.zeros(num_rows, np.int64)
        self.num_null: Ints = np.zeros(num_rows, np.int64)
        # untouched pages take no memory: only what rows hold does
        self.block_ids: Tokens = np.zeros((num_rows, addressing.blocks_per_row), np.int32)
        self._keeps_states = addressing.tokens_per_state_column < MAX_POSITION
        # a column for every so many tokens, and some that do not depend on the tokens
        self._span = addressing.tokens_per_state_column
        if addressing.advances:
            self._span = layout.tokens_per_block
        self._num_extra = max(addressing.states_per_step - 1, 0)
        # leading columns die behind the last tokens that a step reads: a window, or one state
        self._visible = 1 if self._keeps_states else addressing.visible_tokens
        self._expires = self._visible < MAX_POSITION

    def num_blocks(self, num_tokens: Ints) -> Ints:
        """Return what ``layout.num_blocks`` does, for lengths of at least 1."""
        return (num_tokens + (self._span - 1)) // self._span + self._num_extra

    def blocks_of(self, rows: Ints) -> Tokens:
        """Return what rows hold, [N, the most of them], null behind a shorter row's blocks."""
        held = self.held[rows]
        columns = np.arange(held.max(initial=1))
        return np.where(columns < held[:, None], self.block_ids[rows][:, columns], NULL_BLOCK)

    def growth(self, rows: Ints, num_computed: Ints, seq_lens: Ints) -> _Growth | None:
        """Return what a step that leaves rows with ``seq_lens`` tokens adds; None if nothing."""
        places = (seq_lens > (self.held[rows] - self._num_extra) * self._span).nonzero()[0]
        if not len(places):
            return None
        missing = self.num_blocks(seq_lens[places]) - self.held[rows[places]]
        if not self._keeps_states:
            return _Growth(places, missing, None)
        # between the state that a step reads and the one it writes nothing is kept: columns it
        # skips are null, and drafts' states that stand there move to the end of the row
        rows, held = rows[places], self.held[rows[places]]
        read, written = (
            self._state_column(num_computed[places]),
            self._state_column(seq_lens[places]),
        )
        num_null = np.maximum(written - held, 0)
        missing = missing - num_null
        columns = read[:, None] + 1 + np.arange(self._num_extra)
        moved = columns < np.minimum(written, held)[:, None]
        owners, offsets = moved.nonzero()
        moved[owners, offsets] = self.block_ids[rows[owners], columns[owners, offsets]] > 0
        moved &= moved.cumsum(axis=1) <= missing[:, None]
        before = _Before(num_null, moved, read + 1) if moved.any() or num_null.any() else None
        return _Growth(places, missing - moved.sum(axis=1), before)

    def grow(self, rows: Ints, growth: _Growth) -> tuple[Ints, Tokens, Ints]:
        """Add columns to rows; return how many, the new ids row by row, and the rows that moved."""
        rows, counts, before = rows[growth.places], growth.num_fresh, growth.before
        ids = fresh = self.pool.allocate(int(counts.sum()))
        movers = rows[:0]
        if before is not None:
            num_moved = before.moved.sum(axis=1)
            counts = before.num_null + num_moved + growth.num_fresh
            ends = counts.cumsum()
            ids = np.full(int(ends[-1]), NULL_BLOCK, np.int32)
            owners, offsets = before.moved.nonzero()
            columns = before.first_moved[owners] + offsets
            ids[ragged(ends - growth.num_fresh - num_moved, num_moved)] = self.block_ids[
                rows[owners], columns
            ]
            ids[ragged(ends - growth.num_fresh, growth.num_fresh)] = fresh
            self.block_ids[rows[owners], columns] = NULL_BLOCK
            movers = rows[num_moved > 0]
        if len(ids) == len(rows):
            # one each
            self.block_ids[rows, self.held[rows]] = ids
        else:
            self.block_ids[np.repeat(rows, counts), ragged(self.held[rows], counts)] = ids
        self.held[rows] += counts
        return counts, ids, movers

    def trim(self, rows: Ints, num_computed: Ints, last_step: int) -> Ints | None:
        """Give back the leading blocks that no later step reads; return the rows, or None."""
        if not self._expires:
            return None
        places = (num_computed - self._visible >= (self.num_null[rows] + 1) * self._span).nonzero()[
            0
        ]
        rows = rows[places]
        expired = (num_computed[places] - self._visible) // self._span
        dead = np.minimum(expired, self.held[rows])
        has_more = dead > self.num_null[rows]
        if not has_more.any():
            return None
        rows, dead = rows[has_more], dead[has_more]
        counts = dead - self.num_null[rows]
        owners, columns = np.repeat(rows, counts), ragged(self.num_null[rows], counts)
        self.pool.release(self.block_ids[owners, columns], last_step=last_step)
        self.block_ids[owners, columns] = NULL_BLOCK
        self.num_null[rows] = dead
        return rows

    def hold(self, row: int, block_ids: Tokens) -> None:
        """Let an empty row begin with the blocks of a cached prefix, null ones first."""
        self.block_ids[row, : len(block_ids)] = block_ids
        self.held[row] = len(block_ids)
        self.num_null[row] = np.count_nonzero(block_ids == NULL_BLOCK)

    def release(self, rows: Ints, last_step: int) -> None:
        """Give back all blocks of rows."""
        counts = self.held[rows] - self.num_null[rows]
        columns = ragged(self.num_null[rows], counts)
        self.pool.release(self.block_ids[np.repeat(rows, counts), columns], last_step=last_step)
        self.held[rows] = 0
        self.num_null[rows] = 0

    def reset(self, last_step: int) -> None:
        """Take all blocks from all rows, whatever the counts said."""
        self.held[:] = 0
        self.num_null[:] = 0
        self.pool.recount([], last_step=last_step)

    def _state_column(self, num_tokens: Ints) -> Ints:
        return np.maximum(num_tokens - 1, 0) // self._span


class TableEdits(NamedTuple):
    """How rows changed since the last step, in the order in which tables carry it out.

    Attributes:
        null_prefixes: (row, group, leading blocks that are gone).
        cleared: Rows that lost all blocks.
        rows: [M] int32; rows that gained blocks.
        counts: [M, G] int32; how many in each group.
        block_ids: int32; row by row, within a row group by group.
    """

    null_prefixes: list[tuple[int, int, int]]
    cleared: list[int]
    rows: Tokens
    counts: Tokens
    block_ids: Tokens

    def stage(self, tables: StagedBlockTables) -> None:
        """Stage the edits; the next step of the tables carries them out."""
        for row, group, num_blocks in self.null_prefixes:
            tables.null_prefix(row, group, num_blocks)
        for row in self.cleared:
            tables.clear_row(row)
        if len(self.rows):
            tables.stage(self.rows, self.counts, self.block_ids)


class KVCacheManager:
    """Gives rows blocks and takes them back, for all groups or none.

    Attributes:
        groups: One entry per cache group.
        prefixes: Finds what is cached of a request's tokens.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        num_blocks: Sequence[int],
        *,
        prefix_caching: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        """Make one pool per group.

        Args:
            layouts: The groups' plans.
            num_blocks: Blocks of each pool, the null block included.
            prefix_caching: Whether requests share blocks of equal beginnings.
            names: The groups' names, for messages.

        Raises:
            BadInputError: A pool is empty, or a group of states cannot hold a step's drafts.
        """
        for layout in layouts:
            longest_decode = 1 + layout.limits.num_speculative_tokens
            if layout.kind == "mamba" and layout.block_size < longest_decode:
                raise BadInputError(
                    f"states are kept every {layout.block_size} tokens, and a decode step takes "
                    f"{longest_decode}: make the Mamba block size at least {longest_decode}",
                    block_size=layout.block_size,
                    longest_decode=longest_decode,
                )
        self.groups = tuple(
            GroupBlocks(layout, count) for layout, count in zip(layouts, num_blocks, strict=True)
        )
        self._labels = [
            f"group {index}" if names is None else f"group {names[index]!r}"
            for index in range(len(layouts))
        ]
        self._null_prefixes: list[tuple[int, int, int]] = []
        self._cleared: list[int] = []
        self._rewritten: set[int] = set()
        self._grown: list[tuple[int, Ints, Ints, Tokens]] = []
        self.prefixes = PrefixCache(layouts, self.pools, names)
        self._caches = prefix_caching and self.prefixes.reason_for_none is None
        max_num_reqs = layouts[0].limits.max_num_reqs
        # by row: its request's hashes, and how many tokens make another block findable
        self._hashes: list[PrefixHashes] = [self.prefixes.hashes()] * max_num_reqs
        self._next_findable: Ints = np.zeros(max_num_reqs, np.int64)
        self._block_ids = [group.block_ids for group in self.groups]

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """The pool of each group."""
        return tuple(group.pool for group in self.groups)

    @property
    def has_cooling_blocks(self) -> bool:
        """Whether blocks come back when a step in flight has ended."""
        return any(group.pool.num_cooling for group in self.groups)

    def require_room(self, request: Request) -> None:
        """Refuse a request that its groups' pools could not hold alone.

        Raises:
            RequestRefusedError: It says which pool, and how many blocks are missing.
        """
        for index, (label, group) in enumerate(zip(self._labels, self.groups, strict=True)):
            layout, capacity = group.layout, group.pool.capacity
            longest = layout.num_blocks(request.max_len)
            needed = min(longest, layout.max_resident_blocks(layout.limits.max_num_batched_tokens))
            if needed > capacity:
                raise RequestRefusedError(
                    f"request {request.request_id!r} needs {counted(needed, 'block')} of {label} "
                    f"for {counted(request.max_len, 'token')}, and the pool has {capacity} "
                    "besides the null block: shorten it or enlarge the pool",
                    group=index,
                    needed=needed,
                    capacity=capacity,
                )

    def start(self, row: int, request: Request) -> int:
        """Begin an empty row with the cached blocks of a request; return their tokens."""
        if not self._caches:
            return 0
        if request.prefix_hashes is None:
            request.prefix_hashes = self.prefixes.hashes()
        hashes, tokens = request.prefix_hashes, request.token_array
        hashes.extend(tokens)
        # the last token is computed in any case: what follows it is chosen from its logits
        num_hit = self.prefixes.longest(hashes, len(tokens) - 1)
        if num_hit:
            for index, block_ids in enumerate(self.prefixes.acquire(hashes, num_hit)):
                self.groups[index].hold(row, block_ids)
                self._grown.append((index, np.array([row]), np.array([len(block_ids)]), block_ids))
        self._hashes[row] = hashes
        self._next_findable[row] = num_hit + self.prefixes.step
        return num_hit

    def chunk_ends(self, num_computed: Ints, num_tokens: Ints) -> Ints:
        """Return where prefills end that compute at most ``num_tokens`` more."""
        if not self._caches:
            return num_computed + num_tokens
        return self.prefixes.chunk_ends(num_computed, num_tokens)

    def allocate(self, rows: Ints, num_computed: Ints, seq_lens: Ints) -> int:
        """Give rows, first come first served, the blocks of a step.

        Args:
            rows: [N].
            num_computed: [N]; tokens before the step.
            seq_lens: [N]; tokens after it.

        Returns:
            How many leading rows got all they need in every group; the others got nothing.
        """
        growths = [group.growth(rows, num_computed, seq_lens) for group in self.groups]
        num_served = len(rows)
        for group, growth in zip(self.groups, growths, strict=True):
            if growth is not None:
                fitting = growth.num_fitting(group.pool.num_free, len(rows))
                num_served = min(num_served, fitting)
        for index, (group, growth) in enumerate(zip(self.groups, growths, strict=True)):
            if growth is not None:
                served = growth.first(num_served)
                if len(served.places):
                    counts, ids, moved = group.grow(rows, served)
                    self._grown.append((index, rows[served.places], counts, ids))
                    self._rewritten.update(moved.tolist())
        return num_served

    def keep(
        self, rows: Ints, num_computed: Ints, table: RunningRequests, is_prefilling: Flags
    ) -> None:
        """Let other requests find the blocks that rows have filled.

        Call it before ``advance``, which gives some of them back.

        Args:
            rows: [N].
            num_computed: [N]; tokens that the steps launched so far compute for good: no
                draft that may be rejected.
            table: Their tokens; only those that the host knows count.
            is_prefilling: [N]; whether the last step computed a chunk of several tokens.
        """
        if not self._caches:
            return
        known = np.minimum(num_computed, table.num_tokens[rows])
        places = (known >= self._next_findable[rows]).nonzero()[0]
        if not len(places):
            return
        rows, step = rows[places], self.prefixes.step
        next_findable = []
        for row, last, end, is_chunk in zip(
            rows.tolist(),
            known[places].tolist(),
            self._next_findable[rows].tolist(),
            is_prefilling[places].tolist(),
            strict=True,
        ):
            hashes = self._hashes[row]
            max_hashed = hashes.max_hashed
            while end <= last and end <= max_hashed:
                # a prompt is hashed already
                if end > hashes.num_hashed:
                    hashes.add(table.span(row, end - step, end))
                has_state = end == last or not is_chunk
                self.prefixes.keep(hashes, end, row, self._block_ids, has_state=has_state)
                end += step
            next_findable.append(end if end <= max_hashed else MAX_POSITION)
        self._next_findable[rows] = next_findable

    def advance(self, rows: Ints, num_computed: Ints, *, last_step: int) -> None:
        """Note how many tokens of rows are computed, and free what no later step reads."""
        for index, group in enumerate(self.groups):
            trimmed = group.trim(rows, num_computed, last_step)
            if trimmed is not None:
                ends = group.num_null[trimmed].tolist()
                pairs = zip(trimmed.tolist(), ends, strict=True)
                self._null_prefixes += [(row, index, end) for row, end in pairs]

    def release(self, rows: Ints, *, last_step: int) -> None:
        """Drop a reference of all blocks of rows; those without one cool until ``last_step``."""
        for group in self.groups:
            group.release(rows, last_step)
        # what they gained since the last step has not reached the tables, and need not
        self._grown = [
            (index, grown[stays], counts[stays], ids[np.repeat(stays, counts)])
            for index, grown, counts, ids in self._grown
            for stays in [~np.isin(grown, rows)]
            if stays.any()
        ]
        self._rewritten.difference_update(rows.tolist())
        self._cleared += rows.tolist()

    def complete(self, step: int) -> None:
        """Note that all steps up to ``step`` have ended."""
        for group in self.groups:
            group.pool.complete(step)

    def reset(self, *, last_step: int) -> None:
        """Take all blocks from all rows, whatever was under way."""
        for group in self.groups:
            group.reset(last_step)
        self._forget_edits()
        self._cleared = list(range(self.groups[0].layout.limits.max_num_reqs))

    def take_edits(self) -> TableEdits:
        """Return how rows changed since this was last called."""
        rows, counts, ids = self._new_blocks()
        edits = TableEdits(self._null_prefixes, self._cleared, rows, counts, ids)
        self._forget_edits()
        return edits

    def block_ids_of(self, row: int, group: int) -> list[int]:
        """Return what a row holds in a group, null columns included."""
        of_group = self.groups[group]
        ids: list[int] = of_group.block_ids[row, : of_group.held[row]].tolist()
        return ids

    def _new_blocks(self) -> tuple[Tokens, Tokens, Tokens]:
        """Return the rows that gained blocks, how many in each group, and which."""
        num_groups = len(self.groups)
        grown = self._grown
        if self._rewritten:
            # a block moved within these rows: they are given whole, and what stood there goes
            whole = np.array(sorted(self._rewritten))
            self._cleared += whole.tolist()
            grown = [
                (index, rows[kept], counts[kept], ids[np.repeat(kept, counts)])
                for index, rows, counts, ids in grown
                for kept in [~np.isin(rows, whole)]
            ]
            for index, group in enumerate(self.groups):
                held = group.held[whole]
                ids = group.block_ids[np.repeat(whole, held), ragged(np.zeros_like(held), held)]
                grown.append((index, whole, held, ids))
        if not grown:
            return _NO_IDS, np.empty((0, num_groups), np.int32), _NO_IDS
        if len(grown) == 1 and num_groups == 1:
            _, rows, counts, ids = grown[0]
            return rows.astype(np.int32), counts.astype(np.int32)[:, None], ids
        rows, places = np.unique(np.concatenate([part[1] for part in grown]), return_inverse=True)
        all_counts = np.zeros((len(rows), num_groups), np.int32)
        groups = np.concatenate([np.full(len(part[1]), part[0]) for part in grown])
        part_counts = np.concatenate([part[2] for part in grown])
        np.add.at(all_counts, (places, groups), part_counts)
        order = np.repeat(places * num_groups + groups, part_counts).argsort(kind="stable")
        all_ids = np.concatenate([part[3] for part in grown])
        return rows.astype(np.int32), all_counts, all_ids[order]

    def _forget_edits(self) -> None:
        self._null_prefixes, self._cleared = [], []
        self._rewritten, self._grown = set(), []


_NO_IDS: Tokens = np.empty(0, np.int32)


def pool_sizes(
    layouts: Sequence[BlockTableLayout],
    num_blocks: int | Sequence[int] | None,
    *,
    steps_in_flight: int,
) -> tuple[int, ...]:
    """Return the blocks of each group's pool, the null block included.

    Args:
        layouts: The groups' plans.
        num_blocks: Of each pool, or of all; by default enough for as many of the longest
            requests as may run, with none waiting for the blocks of a step in flight.
        steps_in_flight: The most that may be under way at once.

    Raises:
        BadInputError: They are not as many as the groups, or one is not an int.
    """
    if isinstance(num_blocks, int):
        require_int("num_blocks", num_blocks)
        return (num_blocks,) * len(layouts)
    if num_blocks is not None:
        sizes = tuple(as_list("num_blocks", num_blocks))
        for size in sizes:
            require_int("a pool's num_blocks", size)
        if len(sizes) != len(layouts):
            raise BadInputError(
                f"num_blocks has {len(sizes)} pools, and the model {len(layouts)} cache groups",
                num_pools=len(sizes),
                num_groups=len(layouts),
            )
        return sizes
    return tuple(
        1
        + layout.limits.max_num_reqs
        * layout.max_resident_blocks(
            layout.limits.max_num_batched_tokens, steps_in_flight=steps_in_flight
        )
        for layout in layouts
    )
