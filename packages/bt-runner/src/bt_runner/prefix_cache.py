"""Finds the longest prefix of a request that every cache group can continue from.

It knows layouts and pools, no rows and no steps. A hit of ``t`` tokens ends a block in every
group. Of a row it needs what the next step reads, and the columns before that are null::

    tokens                0               t - visible        t
    full attention        [block][block][block][block][block]      all blocks
    sliding window         null   null   null  [block][block]      those the window reaches
    Mamba align            null   null   null   null  [state]      the state after t tokens

which is one rule for all kinds: the blocks from ``layout.num_expired_blocks(t)`` up to ``t``.
Rings and Mamba "none" keep nothing of a prefix: with one of them nothing is ever hit.

A hash names all tokens up to the end of its block: it is SHA-256 over the digests of all groups'
layouts and those tokens, so it is the same for all groups. Blocks with equal hashes hold equal
states: to find other tokens with the same hash is to find a collision of SHA-256, of which none
is known, so tokens are not compared. Each group has a pool, and each pool its own hashes, so
that one group's blocks are never taken for another's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bt_runner.arrays import Ints, Tokens
from bt_runner.block_pool import BlockHash, BlockPool
from bt_width import NULL_BLOCK, BlockTableLayout
from bt_width.layout import MAX_POSITION

_NUM_TOKENS_BYTES = 8


class PrefixHashes(Protocol):
    """The hashes of one request's prefixes."""

    @property
    def num_hashed(self) -> int:
        """Tokens that have hashes."""
        ...

    @property
    def max_hashed(self) -> int:
        """Tokens that can ever have hashes."""
        ...

    def at(self, num_tokens: int) -> BlockHash:
        """Return the hash of the first ``num_tokens`` tokens; they end a block."""
        ...

    def extend(self, tokens: Tokens) -> None:
        """Hash those whole steps of a request's tokens that are not hashed yet."""
        ...

    def add(self, tokens: memoryview) -> None:
        """Hash the next step's tokens."""
        ...

    def restart(self) -> None:
        """Forget what was hashed: ``add`` may have broken off."""
        ...


class TokenHashes:
    """Hashes of token ids, one every step tokens; they grow as tokens become known."""

    __slots__ = ("_hashes", "_root", "_running", "_step", "num_hashed")
    max_hashed = MAX_POSITION

    def __init__(self, root: BlockHash, step: int) -> None:
        """Start before the first token.

        Args:
            root: What else changes the states that are computed from the tokens.
            step: Tokens from one hash to the next.
        """
        self._root = root
        self._step = step
        self.restart()

    def at(self, num_tokens: int) -> BlockHash:
        """Return the hash of the first ``num_tokens`` tokens, a multiple of the step."""
        return self._hashes[num_tokens // self._step - 1]

    def extend(self, tokens: Tokens) -> None:
        """Hash those whole steps of all tokens that are not hashed yet."""
        step = self._step
        for start in range(self.num_hashed, len(tokens) - step + 1, step):
            self.add(tokens[start : start + step].data)

    def add(self, tokens: memoryview) -> None:
        """Hash the next step's tokens."""
        self._running.update(tokens)
        self._hashes.append(self._running.digest())
        self.num_hashed += self._step

    def restart(self) -> None:
        """Forget all tokens."""
        self._running = hashlib.sha256(self._root)
        self._hashes: list[BlockHash] = []
        self.num_hashed = 0


class TraceHashes:
    """Hashes of a prompt of which a trace tells ids, each of ``tokens_per_id`` tokens.

    An id says the same only after the same ids, so each is hashed with those before it. Any
    prefix that ends inside an id's tokens has a hash, too: blocks may be smaller than these.
    A trace tells nothing of the tokens that follow a prompt.
    """

    def __init__(self, hash_ids: Sequence[int], tokens_per_id: int, prompt_len: int) -> None:
        """Hash the ids of a prompt of ``prompt_len`` tokens."""
        self._tokens_per_id = tokens_per_id
        self.num_hashed = self.max_hashed = min(prompt_len, len(hash_ids) * tokens_per_id)
        self._hashes: list[BlockHash] = []
        parent = b""
        for hash_id in hash_ids[: -(-self.num_hashed // tokens_per_id)]:
            parent = hashlib.sha256(parent + b"%d," % hash_id).digest()
            self._hashes.append(parent)

    def at(self, num_tokens: int) -> BlockHash:
        """Return the hash of the first ``num_tokens`` tokens."""
        ids_hash = self._hashes[-(-num_tokens // self._tokens_per_id) - 1]
        return ids_hash + num_tokens.to_bytes(_NUM_TOKENS_BYTES, "little")

    def extend(self, tokens: Tokens) -> None:
        """Do nothing: a prompt's tokens are not told."""

    def add(self, tokens: memoryview) -> None:
        """Do nothing: there is nothing more to know."""

    def restart(self) -> None:
        """Do nothing: what the trace says stays."""


class _Group:
    """What a cache group keeps of a prefix.

    Attributes:
        index: Which group of the model it is.
        layout: The group's plan.
        pool: Its blocks.
        tokens_per_block: Tokens of a block, over all shards.
        keeps_states: Whether a block is the state after its last token, right only where
            a step ended there.
        needs_all: Whether a hit needs every block from the first on.
    """

    def __init__(self, index: int, layout: BlockTableLayout, pool: BlockPool) -> None:
        self.index = index
        self.layout = layout
        self.pool = pool
        self.tokens_per_block = layout.tokens_per_block
        self.keeps_states = layout.addressing.tokens_per_state_column < MAX_POSITION
        self.needs_all = not self.keeps_states and layout.addressing.visible_tokens >= MAX_POSITION

    def longest(self, hashes: PrefixHashes, max_tokens: int, unit: int) -> int:
        """Return the longest hit of at most ``max_tokens``; both are multiples of ``unit``."""
        if self.needs_all:
            for block in range(max_tokens // self.tokens_per_block):
                if self.find(hashes, block) is None:
                    return _down_to(block * self.tokens_per_block, unit)
            return max_tokens
        while max_tokens:
            missing = self._last_missing(hashes, max_tokens)
            if missing is None:
                break
            # every hit that ends behind this block and within its window's reach needs it
            max_tokens = _down_to(missing * self.tokens_per_block, unit)
        return max_tokens

    def find(self, hashes: PrefixHashes, block: int) -> int | None:
        """Return the id of a prefix's block, or None."""
        return self.pool.lookup(hashes.at((block + 1) * self.tokens_per_block))

    def blocks(self, hashes: PrefixHashes, num_tokens: int) -> Tokens:
        """Return a row's blocks after a hit of ``num_tokens`` tokens."""
        ids = np.full(num_tokens // self.tokens_per_block, NULL_BLOCK, np.int32)
        for block in self._needed(num_tokens):
            block_id = self.find(hashes, block)
            ids[block] = NULL_BLOCK if block_id is None else block_id
        return ids

    def _last_missing(self, hashes: PrefixHashes, num_tokens: int) -> int | None:
        for block in reversed(self._needed(num_tokens)):
            if self.find(hashes, block) is None:
                return block
        return None

    def _needed(self, num_tokens: int) -> range:
        return range(
            self.layout.num_expired_blocks(num_tokens), num_tokens // self.tokens_per_block
        )


class PrefixCache:
    """Finds and keeps blocks of all groups together.

    Attributes:
        unit: A hit is a multiple of so many tokens: they end a block in every group.
        step: Tokens from one hash to the next.
        reason_for_none: Why nothing can ever be hit; None where something can.
        hit_tokens: Tokens that requests were spared by other requests' blocks.
        rehit_tokens: Tokens that preempted requests were spared when they came back.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        pools: Sequence[BlockPool],
        names: Sequence[str] | None = None,
    ) -> None:
        """Start empty.

        Args:
            layouts: The groups' plans.
            pools: The groups' pools, which keep the hashes.
            names: The groups' names, for ``reason_for_none``.
        """
        pairs = zip(layouts, pools, strict=True)
        groups = [_Group(index, layout, pool) for index, (layout, pool) in enumerate(pairs)]
        self._groups = tuple(groups)
        # a group that needs all blocks bounds a hit at the least cost
        self._by_cost = tuple(sorted(groups, key=lambda group: not group.needs_all))
        sizes = [group.tokens_per_block for group in groups]
        self.unit = math.lcm(*sizes)
        self.step = math.gcd(*sizes)
        self.reason_for_none = _reason_for_none(layouts, names)
        self.hit_tokens = 0
        self.rehit_tokens = 0
        self._keeps_states = any(group.keeps_states for group in groups)
        digests = "\n".join(layout.digest() for layout in layouts)
        self._root = hashlib.sha256(digests.encode()).digest()

    def hashes(self) -> TokenHashes:
        """Return the hashes of a new request, which has no token yet."""
        return TokenHashes(self._root, self.step)

    def longest(self, hashes: PrefixHashes, max_tokens: int) -> int:
        """Return the most leading tokens, at most ``max_tokens``, that all groups have."""
        if self.reason_for_none is not None:
            return 0
        found = _down_to(min(max_tokens, hashes.num_hashed), self.unit)
        agreed = False
        while found and not agreed:
            agreed = True
            for group in self._by_cost:
                longest = group.longest(hashes, found, self.unit)
                agreed = agreed and longest == found
                found = longest
        return found

    def acquire(self, hashes: PrefixHashes, num_tokens: int) -> list[Tokens]:
        """Take a reference to the blocks of a hit that ``longest`` found.

        Returns:
            The row's blocks, group by group; columns that no later step reads are null.
        """
        rows = [group.blocks(hashes, num_tokens) for group in self._groups]
        for group, ids in zip(self._groups, rows, strict=True):
            group.pool.acquire(ids)
        return rows

    def keep(
        self,
        hashes: PrefixHashes,
        num_tokens: int,
        row: int,
        block_ids: Sequence[Tokens],
        *,
        has_state: bool,
    ) -> None:
        """Let others find the blocks that end with the first ``num_tokens`` tokens of a row.

        Args:
            hashes: Its request's.
            num_tokens: A multiple of ``step``. They are known, and the steps launched so far
                compute their state for good; rejected drafts are not among them.
            row: The row.
            block_ids: The blocks of every row, by group [R, blocks per row].
            has_state: Whether the state after these tokens stands in the column where it is
                looked for: in decode steps always, in a chunk only at its end.
        """
        block_hash = hashes.at(num_tokens)
        for group, ids in zip(self._groups, block_ids, strict=True):
            if num_tokens % group.tokens_per_block == 0 and (has_state or not group.keeps_states):
                block_id = ids.item(row, num_tokens // group.tokens_per_block - 1)
                if block_id != NULL_BLOCK:
                    group.pool.register(block_id, block_hash)

    def chunk_ends(self, num_computed: Ints, num_tokens: Ints) -> Ints:
        """Return where chunks of at most ``num_tokens`` more tokens should end.

        Where a group keeps states, that is the last place in reach that a hit can end at:
        what ``layout.chunk_end`` says, for all groups at once.
        """
        ends = num_computed + num_tokens
        if not self._keeps_states:
            return ends
        boundaries = ends - ends % self.unit
        return np.where(boundaries > num_computed, boundaries, ends)

    def count_hit(self, num_tokens: int, *, is_again: bool) -> None:
        """Count a hit whose request runs; ``is_again`` where it came back from preemption."""
        if is_again:
            self.rehit_tokens += num_tokens
        else:
            self.hit_tokens += num_tokens


def _reason_for_none(
    layouts: Sequence[BlockTableLayout], names: Sequence[str] | None
) -> str | None:
    for index, layout in enumerate(layouts):
        name = f"group {index}" if names is None else f"group {names[index]!r}"
        addressing = layout.addressing
        if layout.kind == "ring":
            return f"{name} is a ring, which keeps only a request's last tokens"
        if layout.kind == "mamba" and addressing.tokens_per_state_column >= MAX_POSITION:
            return f'{name} keeps one state a request (Mamba mode "none"): use mode "align"'
    return None


def _down_to(num_tokens: int, unit: int) -> int:
    return num_tokens - num_tokens % unit
