"""The sanitizer's Triton kernel: one launch that says which checks fail in which groups.

It reads the live columns, the columns that may be stale, and the slots, once. What exactly is
wrong, the reference says, and only where something is. Imported only where a step lies on CUDA or
a test asks.

R rows, N requests, T tokens, W columns, G groups, K checked groups, B blocks of all pools.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bt_width import MAX_POSITION, NULL_BLOCK, PAD_SLOT, Addressing

from ..kernels.addressing import kernel_block_id, local_length, locate_local
from ..triton_support import jit, tl
from .detector import Marks
from .faults import Faults
from .reference import LINE, find_faults
from .step import CacheGroup, CheckedStep, GroupStep


class GroupTensors(NamedTuple):
    """Where a launch finds the tensors of a checked group; its addressing follows in the line."""

    group: int
    table_address: int
    table_row_stride: int
    table_rows: int
    slots_address: int
    num_slots: int
    refs_address: int
    given_address: int
    given_row_stride: int
    given_columns: int
    claims_at: int
    num_blocks: int

    @classmethod
    def of(cls, group: GroupStep, claims_at: int) -> GroupTensors:
        """Read a group's tensors; the launch must come before they are freed."""
        given = group.ref_blocks
        return cls(
            group=group.group,
            table_address=group.table.data_ptr(),
            table_row_stride=group.table.stride(0),
            table_rows=group.table.shape[0],
            slots_address=group.slots.data_ptr(),
            num_slots=group.slots.shape[0],
            refs_address=0 if group.ref_counts is None else group.ref_counts.data_ptr(),
            given_address=0 if given is None else given.data_ptr(),
            given_row_stride=0 if given is None else given.stride(0),
            given_columns=0 if given is None else given.shape[1],
            claims_at=claims_at,
            num_blocks=group.num_blocks,
        )


_FIELDS = GroupTensors._fields + Addressing._fields


def _field(name: str) -> tl.constexpr:
    return tl.constexpr(_FIELDS.index(name))


NUM_FIELDS = tl.constexpr(len(_FIELDS))
GROUP = _field("group")
TABLE = _field("table_address")
TABLE_ROW_STRIDE = _field("table_row_stride")
TABLE_ROWS = _field("table_rows")
SLOTS = _field("slots_address")
NUM_SLOTS = _field("num_slots")
REFS = _field("refs_address")
GIVEN = _field("given_address")
GIVEN_ROW_STRIDE = _field("given_row_stride")
GIVEN_COLUMNS = _field("given_columns")
CLAIMS_AT = _field("claims_at")
NUM_BLOCKS = _field("num_blocks")
WIDTH = _field("width")
SPLIT = _field("kernel_blocks_per_block")
KERNEL_BLOCK_SIZE = _field("kernel_block_size")
SHARDS_AT = _field("shards")
INTERLEAVE_AT = _field("interleave")
RANK_AT = _field("rank")
ADVANCES = _field("advances")
SLOT_BLOCKS = _field("slot_blocks")
VISIBLE_TOKENS = _field("visible_tokens")
TOKENS_PER_STATE_COLUMN = _field("tokens_per_state_column")
STATES_PER_STEP = _field("states_per_step")
MAX_TOKENS = _field("max_tokens")
COLUMNS_OF_LINE = tl.constexpr(LINE)
NULL = tl.constexpr(NULL_BLOCK)
PAD = tl.constexpr(PAD_SLOT)
LAST_POSITION = tl.constexpr(MAX_POSITION)
ROW_CHECKS = tl.constexpr(0)
COLUMN_CHECKS = tl.constexpr(1)
OWNER_CHECKS = tl.constexpr(2)
SLOT_CHECKS = tl.constexpr(3)
NUM_CHECKS = tl.constexpr(4)

_COLUMN_TILE = 512
_TOKEN_TILE = 128

# a word of claims: the launch, the claims of writers, all claims
LAUNCH_SHIFT = tl.constexpr(40)
WRITERS_SHIFT = tl.constexpr(20)
CLAIMS_MASK = tl.constexpr((1 << 20) - 1)
MAX_LAUNCHES = 2**22
"""Launches after which a word runs out of numbers for them."""


class KernelDetector:
    """Runs the kernel on every step, and the reference on those at fault."""

    def __init__(self, groups: Sequence[CacheGroup], max_rows: int, device: torch.device) -> None:
        """Allocate what the launches leave behind: 8 bytes a block, 4 a row and group."""
        self.device = device
        self._marks = Marks(groups, max_rows, device)
        self._claims_at = list(
            itertools.accumulate((group.num_blocks for group in groups), initial=0)
        )
        self._scratch = Scratch.make(self._marks.columns, self._claims_at[-1])
        self._launch = 0
        self._lines: tuple[tuple[int, ...], ...] = ()
        self._loaded = torch.empty(0, dtype=torch.int64, device=device)

    def find(self, step: CheckedStep) -> list[Faults] | None:
        """Return the faults by the reference, None where it sees nothing of what was seen."""
        if not self.detect(step).any():
            return []
        self.forget()
        return find_faults(step, self._marks.columns) or None

    def detect(self, step: CheckedStep) -> torch.Tensor:
        """Launch, and return [G, checks] on the host: which checks failed in which group."""
        if self._launch == MAX_LAUNCHES:
            self.forget()
        self._launch += 1
        # Triton launches on the current device, which need not be the tables'
        with torch.cuda.device(self._scratch.found.get_device()):
            launch_check(step, self._load_lines(step), self._scratch, self._launch)
        return self._scratch.found.cpu() == self._launch

    def forget(self) -> None:
        """Read every row to its width in the next step, and count claims and launches anew."""
        self._marks.forget()
        self._scratch.claims.zero_()
        self._scratch.found.zero_()
        self._launch = 0

    def _load_lines(self, step: CheckedStep) -> torch.Tensor:
        lines = tuple(
            (*GroupTensors.of(group, self._claims_at[group.group]), *group.addressing)
            for group in step.groups
        )
        if lines != self._lines:
            self._lines = lines
            self._loaded = torch.tensor(lines, dtype=torch.int64, device=self.device)
        return self._loaded


class Scratch(NamedTuple):
    """What launches leave behind on the device.

    Attributes:
        marks: [G, R] int32, columns below which a row of a table may hold ids.
        claims: [B] int64, what counted a block: the launch, the writers, the claims.
        found: [G, NUM_CHECKS] int64, the last launch that found a fault.
    """

    marks: torch.Tensor
    claims: torch.Tensor
    found: torch.Tensor

    @classmethod
    def make(cls, marks: torch.Tensor, num_blocks: int) -> Scratch:
        """Allocate the rest beside ``marks``, for pools of ``num_blocks`` blocks together."""
        claims = torch.zeros(num_blocks, dtype=torch.int64, device=marks.device)
        found = torch.zeros(
            marks.shape[0], NUM_CHECKS.value, dtype=torch.int64, device=marks.device
        )
        return cls(marks, claims, found)


def launch_check(step: CheckedStep, lines: torch.Tensor, scratch: Scratch, launch: int) -> None:
    """Check a step; ``scratch.found`` holds ``launch`` afterwards where something is wrong.

    Args:
        step: The step, all on one device.
        lines: [K, fields] int64, the lines of the step's groups.
        scratch: What earlier launches left.
        launch: The number of the launch, from 1 and rising.
    """
    num_rows = max(step.query_start_loc.shape[0] - 1, 1)
    num_rows = max([num_rows, *(group.table.shape[0] for group in step.groups)])
    num_slots = [group.slots.shape[0] for group in step.groups]
    num_tiles = -(-max(num_slots) // _TOKEN_TILE)
    num_blocks = step.num_blocks_of_row
    check_step_kernel[(len(step.groups) * (num_rows + num_tiles),)](
        groups_ptr=lines,
        seq_lens_ptr=step.seq_lens,
        starts_ptr=step.query_start_loc,
        num_blocks_ptr=num_blocks,
        num_blocks_row_stride=num_blocks.stride(0),
        num_blocks_group_stride=num_blocks.stride(1),
        marks_ptr=scratch.marks,
        marks_group_stride=scratch.marks.stride(0),
        claims_ptr=scratch.claims,
        found_ptr=scratch.found,
        num_reqs=step.num_reqs,
        num_rows=num_rows,
        num_starts=step.query_start_loc.shape[0],
        num_slots=min(num_slots),
        num_tiles=num_tiles,
        launch=launch,
        HAS_REFS=step.groups[0].ref_counts is not None,
        HAS_GIVEN=step.groups[0].ref_blocks is not None,
        UNTOUCHED=step.checks_untouched,
        SHARED_WRITES=step.checks_shared_writes,
        SEARCH_STEPS=scratch.marks.shape[1].bit_length(),
        COLUMN_TILE=_COLUMN_TILE,
        TOKEN_TILE=_TOKEN_TILE,
    )


@jit
def check_step_kernel(
    groups_ptr: tl.tensor,  # [K, NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N] int32 or int64
    starts_ptr: tl.tensor,  # [num_starts] int32 or int64
    num_blocks_ptr: tl.tensor,  # [N, G] int32 or int64
    num_blocks_row_stride: tl.tensor,
    num_blocks_group_stride: tl.tensor,
    marks_ptr: tl.tensor,  # [G, R] int32
    marks_group_stride: tl.tensor,
    claims_ptr: tl.tensor,  # [B] int64
    found_ptr: tl.tensor,  # [G, NUM_CHECKS] int64
    num_reqs: tl.tensor,
    num_rows: tl.tensor,
    num_starts: tl.tensor,
    num_slots: tl.tensor,  # the fewest of a group
    num_tiles: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    UNTOUCHED: tl.constexpr,
    SHARED_WRITES: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
) -> None:
    """Give each program one row or one tile of tokens of one group."""
    part = tl.program_id(0) % (num_rows + num_tiles)
    group_ptr = groups_ptr + tl.program_id(0) // (num_rows + num_tiles) * NUM_FIELDS
    group = tl.load(group_ptr + GROUP)
    found = found_ptr + group * NUM_CHECKS
    stamp = tl.cast(launch, tl.int64)
    if part < num_rows:
        num_blocks = num_blocks_ptr + group * num_blocks_group_stride
        marks = marks_ptr + group * marks_group_stride
        bad_row, bad_columns, bad_owners = check_row(
            group_ptr,
            seq_lens_ptr,
            starts_ptr,
            num_blocks + part.to(tl.int64) * num_blocks_row_stride,
            marks + part,
            claims_ptr,
            part,
            num_reqs,
            num_starts,
            num_slots,
            stamp,
            HAS_REFS,
            HAS_GIVEN,
            UNTOUCHED,
            SHARED_WRITES,
            COLUMN_TILE,
        )
        tl.store(found + ROW_CHECKS, stamp, mask=bad_row != 0)
        tl.store(found + COLUMN_CHECKS, stamp, mask=bad_columns != 0)
        tl.store(found + OWNER_CHECKS, stamp, mask=bad_owners != 0)
    else:
        token = (part - num_rows) * TOKEN_TILE + tl.arange(0, TOKEN_TILE)
        bad_slots = check_tokens(group_ptr, seq_lens_ptr, starts_ptr, token, num_reqs, SEARCH_STEPS)
        tl.store(found + SLOT_CHECKS, stamp, mask=bad_slots != 0)


@jit
def check_row(
    group_ptr: tl.tensor,  # [NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N]
    starts_ptr: tl.tensor,  # [num_starts]
    num_blocks_ptr: tl.tensor,  # the row's
    mark_ptr: tl.tensor,  # the row's, int32
    claims_ptr: tl.tensor,  # [B] int64
    row: tl.tensor,
    num_reqs: tl.tensor,
    num_starts: tl.tensor,
    num_slots: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    UNTOUCHED: tl.constexpr,
    SHARED_WRITES: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> tl.tensor:
    """Return whether the row's numbers, its columns and its owners are at fault, 0 where not."""
    width, split = tl.load(group_ptr + WIDTH), tl.load(group_ptr + SPLIT)
    max_tokens = tl.load(group_ptr + MAX_TOKENS)
    is_request = row < num_reqs
    start = tl.load(starts_ptr + row, mask=row < num_starts, other=0).to(tl.int64)
    end = tl.load(starts_ptr + row + 1, mask=row + 1 < num_starts, other=0).to(tl.int64)
    total = tl.load(starts_ptr + num_reqs).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=is_request, other=0).to(tl.int64)
    blocks = tl.load(num_blocks_ptr, mask=is_request, other=0).to(tl.int64)
    query = tl.where(is_request, end - start, 0)
    bad_row = (length < query) | (length > max_tokens)
    bad_row |= (row + 1 < num_starts) & (end < start)
    bad_row |= (row == 0) & ((start != 0) | (total > num_slots))
    bad_row |= (blocks < 0) | (blocks > width // split)

    computed = length - query
    length = tl.minimum(tl.maximum(length, 0), max_tokens)
    computed = tl.minimum(tl.maximum(computed, 0), length)
    live = tl.minimum(tl.maximum(blocks, 0), width // split) * split
    read_from, read_to, write_from, write_to = _reach(group_ptr, computed, length)
    reach_end = tl.maximum(read_to, write_to)
    bad_row |= (reach_end + split - 1) // split > tl.maximum(blocks, 0)

    has_row = row < tl.load(group_ptr + TABLE_ROWS)
    mark = tl.load(mark_ptr, mask=has_row, other=0).to(tl.int64)
    scanned = tl.minimum((tl.maximum(live, mark) // COLUMNS_OF_LINE + 1) * COLUMNS_OF_LINE, width)
    if not UNTOUCHED:
        scanned = tl.where(is_request, live, scanned)
    scanned = tl.where(has_row, scanned, 0)
    table = tl.load(group_ptr + TABLE).to(tl.pointer_type(tl.int32))
    table += row.to(tl.int64) * tl.load(group_ptr + TABLE_ROW_STRIDE)
    given = tl.load(group_ptr + GIVEN).to(tl.pointer_type(tl.int32))
    given += row.to(tl.int64) * tl.load(group_ptr + GIVEN_ROW_STRIDE)
    bad_columns, bad_owners = _scan(
        group_ptr,
        claims_ptr,
        table,
        given,
        live,
        scanned,
        read_from,
        read_to,
        write_from,
        write_to,
        launch,
        HAS_REFS,
        HAS_GIVEN,
        UNTOUCHED,
        SHARED_WRITES,
        COLUMN_TILE,
    )
    tl.store(mark_ptr, live.to(tl.int32), mask=has_row)
    return bad_row, bad_columns, bad_owners


@jit
def _scan(
    group_ptr: tl.tensor,
    claims_ptr: tl.tensor,  # [B] int64
    table: tl.tensor,  # the row's columns
    given: tl.tensor,  # the blocks that the row was given
    live: tl.tensor,
    scanned: tl.tensor,
    read_from: tl.tensor,
    read_to: tl.tensor,
    write_from: tl.tensor,
    write_to: tl.tensor,
    launch: tl.tensor,
    HAS_REFS: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    UNTOUCHED: tl.constexpr,
    SHARED_WRITES: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
) -> tl.tensor:
    """Return whether a column, or a block's owners, are at fault in the columns of a row."""
    split = tl.load(group_ptr + SPLIT)
    # an empty range touches no block, wherever it lies
    written_to = tl.where(write_from < write_to, write_to, 0)
    seen_to = tl.where(read_from < read_to, read_to, 0)
    bad_columns, bad_owners = 0, 0
    first_column = tl.zeros((), tl.int64)
    while first_column < scanned:
        column = first_column + tl.arange(0, COLUMN_TILE)
        is_live, is_scanned = column < live, column < scanned
        if not UNTOUCHED:
            first = column - column % split
            is_seen = (first + split > read_from) & (first < seen_to)
            is_live &= is_seen | ((first + split > write_from) & (first < written_to))
            # what is live and not touched may hold anything
            is_scanned &= is_live | (column >= live)
        ids = tl.load(table + column, mask=is_scanned, other=0).to(tl.int64)
        heads = tl.load(table + column - column % split, mask=is_scanned, other=0).to(tl.int64)
        is_touched = (column >= read_from) & (column < read_to)
        is_written = (column >= write_from) & (column < write_to)
        bad = _bad_columns(group_ptr, column, ids, heads, is_live, is_touched | is_written)
        bad_columns = tl.maximum(bad_columns, tl.max(bad.to(tl.int32), 0))
        is_written = (column + split > write_from) & (column < written_to)
        is_head = is_live & (column % split == 0)
        if HAS_GIVEN:
            bad = _wrong_blocks(group_ptr, given, column, ids, is_head)
            bad_columns = tl.maximum(bad_columns, tl.max(bad.to(tl.int32), 0))
        bad = claim_blocks(
            group_ptr, claims_ptr, ids, is_head, is_written, launch, HAS_REFS, SHARED_WRITES
        )
        bad_owners = tl.maximum(bad_owners, tl.max(bad.to(tl.int32), 0))
        first_column += COLUMN_TILE
    return bad_columns, bad_owners


@jit
def _wrong_blocks(
    group_ptr: tl.tensor,
    given: tl.tensor,  # the blocks that the row was given
    column: tl.tensor,
    ids: tl.tensor,
    is_head: tl.tensor,  # where a live block of the row begins
) -> tl.tensor:
    """Return where a block of the pool is not the one that the row was given."""
    split = tl.load(group_ptr + SPLIT)
    at = column // split
    is_known = is_head & (at < tl.load(group_ptr + GIVEN_COLUMNS))
    wanted = tl.load(given + at, mask=is_known, other=NULL).to(tl.int64)
    is_id = (ids >= split) & (ids < tl.load(group_ptr + NUM_BLOCKS) * split)
    return is_head & is_id & (ids // split != wanted)


@jit
def _reach(group_ptr: tl.tensor, computed: tl.tensor, length: tl.tensor) -> tl.tensor:
    """Return the columns that are read and written: two half-open ranges."""
    if tl.load(group_ptr + ADVANCES) == 0:
        tokens = tl.load(group_ptr + TOKENS_PER_STATE_COLUMN)
        read_from = tl.maximum(computed - 1, 0) // tokens
        read_to = read_from + (computed > 0)
        write_from = tl.maximum(length - 1, 0) // tokens
        write_to = write_from + (length > computed) * tl.load(group_ptr + STATES_PER_STEP)
    else:
        size = tl.load(group_ptr + KERNEL_BLOCK_SIZE)
        shards, interleave = tl.load(group_ptr + SHARDS_AT), tl.load(group_ptr + INTERLEAVE_AT)
        rank = tl.load(group_ptr + RANK_AT)
        before = local_length(computed, shards, rank, interleave)
        after = local_length(length, shards, rank, interleave)
        read_to = (after + size - 1) // size
        read_from = tl.maximum(computed - tl.load(group_ptr + VISIBLE_TOKENS), 0) // size
        read_from = tl.minimum(read_from, read_to)
        write_from = tl.minimum(before // size, read_to)
        write_to = tl.where(after > before, read_to, write_from)
    return read_from, read_to, write_from, write_to


@jit
def _bad_columns(
    group_ptr: tl.tensor,
    column: tl.tensor,
    ids: tl.tensor,
    heads: tl.tensor,  # what the first column of the block holds
    is_live: tl.tensor,
    is_touched: tl.tensor,
) -> tl.tensor:
    """Return where a column is not what it must be on its own."""
    split = tl.load(group_ptr + SPLIT)
    is_id = (ids >= split) & (ids < tl.load(group_ptr + NUM_BLOCKS) * split)
    whole = kernel_block_id(heads // split, column % split, split)
    bad_live = (ids != NULL) & (~is_id | (ids != whole))
    bad_live |= (ids == NULL) & (is_touched | (whole != NULL))
    return tl.where(is_live, bad_live, ids != NULL)


@jit
def claim_blocks(
    group_ptr: tl.tensor,  # [NUM_FIELDS] int64
    claims_ptr: tl.tensor,  # [B] int64
    ids: tl.tensor,  # [tile] int64
    is_head: tl.tensor,  # [tile], where a live block of the row begins
    is_written: tl.tensor,  # [tile], where the step writes to that block
    launch: tl.tensor,  # int64
    HAS_REFS: tl.constexpr,
    SHARED_WRITES: tl.constexpr,
) -> tl.tensor:
    """Count the row among a block's holders; return where it must not be one.

    The last of a block's claims sees all others, so a conflict is seen in any order.
    """
    block = ids // tl.load(group_ptr + SPLIT)
    is_claim = is_head & (block > 0) & (block < tl.load(group_ptr + NUM_BLOCKS))
    block = tl.where(is_claim, block, 0)
    word = claims_ptr + tl.load(group_ptr + CLAIMS_AT) + block
    fresh = (block * 0) + (launch << LAUNCH_SHIFT)
    tl.atomic_max(word, fresh, mask=is_claim)
    one = 1 + (is_written.to(tl.int64) << WRITERS_SHIFT)
    earlier = tl.atomic_add(word, one, mask=is_claim) - fresh
    claims = earlier & CLAIMS_MASK
    if HAS_REFS:
        refs = tl.load(group_ptr + REFS).to(tl.pointer_type(tl.int32))
        holders = tl.load(refs + block, mask=is_claim, other=0)
        bad = (holders <= 0) | (claims >= holders)
        if SHARED_WRITES:
            bad |= is_written & (holders > 1)
    else:
        bad = (claims > 0) & (is_written | (earlier >> WRITERS_SHIFT > 0))
    return is_claim & bad


@jit
def check_tokens(
    group_ptr: tl.tensor,  # [NUM_FIELDS] int64
    seq_lens_ptr: tl.tensor,  # [N]
    starts_ptr: tl.tensor,  # [N + 1]
    token: tl.tensor,  # [tile] int32
    num_reqs: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
) -> tl.tensor:
    """Return 1 where a slot of the tile is wrong, padding above the real tokens included."""
    is_slot = token < tl.load(group_ptr + NUM_SLOTS)
    slots = tl.load(group_ptr + SLOTS).to(tl.pointer_type(tl.int64))
    found = tl.load(slots + token, mask=is_slot, other=PAD)
    row, is_real = _row_of(starts_ptr, token, num_reqs, SEARCH_STEPS)
    query_end = tl.load(starts_ptr + row + 1, mask=is_real, other=0).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=is_real, other=0).to(tl.int64)
    position = length - query_end + token
    is_placed = is_real & (position >= 0) & (position <= LAST_POSITION)
    position = tl.where(is_placed, position, 0)

    size = tl.load(group_ptr + KERNEL_BLOCK_SIZE)
    shards, interleave = tl.load(group_ptr + SHARDS_AT), tl.load(group_ptr + INTERLEAVE_AT)
    is_ours, local = locate_local(position, shards, tl.load(group_ptr + RANK_AT), interleave)
    # a ring comes round in its one block
    local = tl.where(tl.load(group_ptr + ADVANCES) == 0, position % size, local)
    column, offset = local // size, local % size
    # a group without slots has no column with one
    end = tl.where(tl.load(group_ptr + SLOT_BLOCKS) > 0, tl.load(group_ptr + WIDTH), 0)
    has_slot = is_placed & is_ours & (column < end)
    table = tl.load(group_ptr + TABLE).to(tl.pointer_type(tl.int32))
    place = row.to(tl.int64) * tl.load(group_ptr + TABLE_ROW_STRIDE) + column
    ids = tl.load(table + place, mask=has_slot, other=0).to(tl.int64)
    expected = tl.where(has_slot & (ids > NULL), ids * size + offset, PAD)
    return tl.max((is_slot & (found != expected)).to(tl.int32), 0)


@jit
def _row_of(
    starts_ptr: tl.tensor,  # [N + 1]
    token: tl.tensor,
    num_reqs: tl.tensor,
    SEARCH_STEPS: tl.constexpr,
) -> tl.tensor:
    """Return each token's request by binary search, and whether it has one."""
    low = token * 0
    high = low + num_reqs
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(starts_ptr + middle + 1, mask=is_open, other=0)
        is_above = is_open & (end <= token)
        low = tl.where(is_above, middle + 1, low)
        high = tl.where(is_open & ~is_above, middle, high)
    return low, low < num_reqs
