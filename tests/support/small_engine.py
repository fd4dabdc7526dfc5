"""A small engine that serves made-up requests: it allocates, shares, frees, and fills tables.

It knows blocks and lengths, no model. Every number of a step comes from ``layout`` and from plain
Python lists, so that what it hands to the tables can be trusted, and a fault can be planted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout, ServingLimits


@dataclass
class SmallPool:
    """The blocks of one group: taken from the front, given back to the end."""

    num_blocks: int
    free: deque[int] = field(default_factory=deque)
    refs: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = deque(range(1, self.num_blocks))
        self.refs = [0] * self.num_blocks

    def take(self) -> int:
        block = self.free.popleft()
        self.refs[block] = 1
        return block

    def drop(self, block: int) -> None:
        if block == NULL_BLOCK:
            return
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free.append(block)


@dataclass
class SmallRequest:
    """A request: the row it was given, the blocks it holds, and how far it has come."""

    row: int
    goal: int
    blocks: list[list[int]]
    computed: int = 0


@dataclass(frozen=True)
class SmallStep:
    """What a step hands to kernels, and to the sanitizer."""

    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_blocks_of_row: torch.Tensor
    ref_counts: tuple[torch.Tensor, ...]
    ref_blocks: tuple[torch.Tensor, ...]
    requests: tuple[SmallRequest, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


class Tables(Protocol):
    """What the engine needs of tables; rows are those of its requests."""

    def add(self, row: int, blocks: Sequence[Sequence[int]]) -> None: ...
    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None: ...
    def clear(self, row: int) -> None: ...
    def null_prefix(self, row: int, group: int, num_blocks: int) -> None: ...
    def batch(self, rows: Sequence[int]) -> Sequence[int]:
        """Put the rows of a step in the order in which the tables want them."""
        ...

    def fill(
        self,
        rows: Sequence[int],
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]: ...


class PlainTables:
    """Tables made anew each step by bt-width's pure functions, in buffers that stay."""

    def __init__(self, layouts: Sequence[BlockTableLayout]) -> None:
        self.layouts = layouts
        self.rows: dict[int, list[list[int]]] = {}
        limits = layouts[0].limits
        self.buffers = [
            torch.zeros(limits.max_num_reqs, layout.width, dtype=torch.int32) for layout in layouts
        ]
        self.slots = torch.full((len(layouts), limits.max_num_batched_tokens), PAD_SLOT)

    def add(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        self.rows[row] = [list(ids) for ids in blocks]

    def append(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        for held, ids in zip(self.rows[row], blocks, strict=True):
            held.extend(ids)

    def clear(self, row: int) -> None:
        del self.rows[row]

    def null_prefix(self, row: int, group: int, num_blocks: int) -> None:
        self.rows[row][group][:num_blocks] = [NULL_BLOCK] * num_blocks

    def batch(self, rows: Sequence[int]) -> Sequence[int]:
        return rows

    def fill(
        self,
        rows: Sequence[int],
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_reqs_padded: int,
        num_tokens_padded: int,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        starts = query_start_loc.tolist()
        self.slots.fill_(PAD_SLOT)
        for group, layout in enumerate(self.layouts):
            table = self.buffers[group].zero_()
            for at, row in enumerate(rows):
                ids = layout.expand(self.rows[row][group])
                table[at, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
                for token in range(starts[at], starts[at + 1]):
                    self.slots[group, token] = layout.slot(int(positions[token]), ids)
        tables = tuple(buffer[:num_reqs_padded] for buffer in self.buffers)
        return tables, self.slots[:, :num_tokens_padded]


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return [rows, blocks] int32, null past each row's blocks."""
    padded = torch.zeros(len(rows), max(map(len, rows), default=0), dtype=torch.int32)
    for at, blocks in enumerate(rows):
        padded[at, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    return padded


class SmallEngine:
    """Random traffic over some groups; ``step`` moves every scheduled request on."""

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        num_blocks: Sequence[int],
        tables: Tables,
        seed: int,
    ) -> None:
        self.layouts = layouts
        self.pools = [SmallPool(count) for count in num_blocks]
        self.tables = tables
        self.draw = random.Random(seed)
        self.live: dict[int, SmallRequest] = {}
        self.limits: ServingLimits = layouts[0].limits
        self.can_share = all(layout.slot_mode == "block" for layout in layouts)

    def step(self) -> SmallStep:
        """Finish, admit, schedule, allocate, and fill the tables of one step."""
        for request in [r for r in self.live.values() if r.computed >= r.goal]:
            self.remove(request)
        if self.live and self.draw.random() < 0.05:
            self.remove(self.draw.choice(list(self.live.values())))
        free_rows = [row for row in range(self.limits.max_num_reqs) if row not in self.live]
        for row in self.draw.sample(free_rows, self.draw.randint(0, len(free_rows))):
            self.admit(row)
        return self.run(self.schedule())

    def schedule(self) -> list[tuple[SmallRequest, int]]:
        """Choose how many tokens each request gets: a chunk of a prompt, a token, or none."""
        budget = self.limits.max_num_batched_tokens
        wanted = []
        rows = list(self.live)
        self.draw.shuffle(rows)
        for row in self.tables.batch(rows):
            request = self.live[row]
            most = min(budget, request.goal - request.computed)
            query = self.draw.choice([0, 1, 1, 2, most, self.draw.randint(0, most)])
            query = min(query, most)
            if not self.has_room(request, query):
                query = 0
            budget -= query
            if query and self.grow(request, request.computed + query) is None:
                raise AssertionError("room was checked")
            wanted.append((request, query))
        return wanted

    def run(self, scheduled: Sequence[tuple[SmallRequest, int]]) -> SmallStep:
        """Fill the tables for the scheduled tokens, and count them as computed."""
        queries = [query for _, query in scheduled]
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        positions = [
            torch.arange(request.computed, request.computed + query) for request, query in scheduled
        ]
        num_reqs, num_tokens = len(scheduled), int(starts[-1])
        num_reqs_padded = self.draw.randint(num_reqs, self.limits.max_num_reqs)
        num_tokens_padded = self.draw.randint(num_tokens, self.limits.max_num_batched_tokens)
        tables, slots = self.tables.fill(
            [request.row for request, _ in scheduled],
            starts,
            torch.cat([torch.empty(0, dtype=torch.int64), *positions]),
            num_reqs_padded,
            num_tokens_padded,
        )
        for request, query in scheduled:
            request.computed += query
        requests = tuple(request for request, _ in scheduled)
        counts = [[len(ids) for ids in request.blocks] for request in requests]
        return SmallStep(
            block_tables=tables,
            slot_mappings=slots,
            seq_lens=torch.tensor([r.computed for r in requests], dtype=torch.int32),
            query_start_loc=starts,
            num_blocks_of_row=torch.tensor(counts, dtype=torch.int32).view(
                num_reqs, len(self.layouts)
            ),
            ref_counts=tuple(torch.tensor(pool.refs, dtype=torch.int32) for pool in self.pools),
            ref_blocks=tuple(
                _padded([request.blocks[group] for request in requests])
                for group in range(len(self.layouts))
            ),
            requests=requests,
        )

    def admit(self, row: int) -> SmallRequest:
        """Let a request in, on blocks of a live one where that is possible."""
        goal = self.draw.randint(1, self.limits.max_tokens)
        request = SmallRequest(row, goal, [[] for _ in self.layouts])
        if self.can_share and self.live and self.draw.random() < 0.5:
            self.share(request, self.draw.choice(list(self.live.values())))
        self.live[row] = request
        self.tables.add(row, request.blocks)
        return request

    def share(self, request: SmallRequest, other: SmallRequest) -> None:
        """Give a new request the whole blocks that another one has computed."""
        whole = other.computed
        while whole and any(whole % layout.tokens_per_block for layout in self.layouts):
            whole -= 1
        if not 0 < whole < request.goal:
            return
        prefixes = [
            theirs[: layout.num_blocks(whole)]
            for theirs, layout in zip(other.blocks, self.layouts, strict=True)
        ]
        if any(
            NULL_BLOCK in prefix[self.blocks_behind(whole, group) :]
            for group, prefix in enumerate(prefixes)
        ):
            # a block that the new request would still see is gone
            return
        for held, prefix, pool in zip(request.blocks, prefixes, self.pools, strict=True):
            held.extend(prefix)
            for block in prefix:
                pool.refs[block] += block != NULL_BLOCK
        request.computed = whole

    def has_room(self, request: SmallRequest, query: int) -> bool:
        """Whether the pools hold what ``query`` more tokens need."""
        return all(
            layout.num_blocks(request.computed + query) - len(ids) <= len(pool.free)
            for layout, ids, pool in zip(self.layouts, request.blocks, self.pools, strict=True)
        )

    def grow(self, request: SmallRequest, length: int) -> list[list[int]]:
        """Give a request the blocks of ``length`` tokens, and back those behind a window."""
        fresh: list[list[int]] = []
        for group, layout in enumerate(self.layouts):
            held = request.blocks[group]
            new: list[int] = []
            for column in range(len(held), layout.num_blocks(length)):
                is_gap = layout.kind == "mamba" and column < layout.state_column(length)
                new.append(NULL_BLOCK if is_gap else self.pools[group].take())
            held.extend(new)
            fresh.append(new)
        self.tables.append(request.row, fresh)
        for group, layout in enumerate(self.layouts):
            if layout.kind == "window":
                self.null_behind(request, group)
        return fresh

    def null_behind(self, request: SmallRequest, group: int) -> None:
        """Null and free the blocks that no query sees any more."""
        gone = self.blocks_behind(request.computed, group)
        held = request.blocks[group]
        if gone:
            self.tables.null_prefix(request.row, group, gone)
        for column in range(gone):
            self.pools[group].drop(held[column])
            held[column] = NULL_BLOCK

    def blocks_behind(self, computed: int, group: int) -> int:
        """Return the leading blocks that a query after ``computed`` tokens does not see."""
        layout = self.layouts[group]
        if layout.kind != "window":
            return 0
        spec = layout.spec
        seen_from = computed - spec.window + 1 - spec.extra_retained_tokens  # type: ignore[union-attr]  # a window
        return max(seen_from, 0) // layout.block_size

    def remove(self, request: SmallRequest) -> None:
        """Let a request go: its row is cleared and its blocks are given back."""
        self.tables.clear(request.row)
        del self.live[request.row]
        for ids, pool in zip(request.blocks, self.pools, strict=True):
            for block in ids:
                pool.drop(block)
