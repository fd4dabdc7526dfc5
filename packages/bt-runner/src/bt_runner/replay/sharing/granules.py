"""A prefix in pieces: what a piece is found by, the blocks that it is in, and who holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

PrefixKey: TypeAlias = tuple[int, tuple[int, ...]]
"""A granule's place in its request, and the hash ids of the tokens in it."""


@dataclass(slots=True, eq=False)
class Granule:
    """The blocks of a granule's tokens.

    Attributes:
        key: What it is found by.
        parent: The granule before it; None for a first one.
        block_ids: Its blocks, group by group.
        num_users: Requests that hold its blocks.
    """

    key: PrefixKey
    parent: Granule | None
    block_ids: tuple[tuple[int, ...], ...]
    num_users: int = 0


@dataclass(slots=True, eq=False)
class PrefixUse:
    """What one request has to do with the cache.

    Attributes:
        keys: Its prompt's whole granules, in order.
        granules: Those whose blocks it holds and shares.
        num_found: Granules found for it, until it has run a step.
        num_offered: Leading granules that were found or offered.
        last: The last of them.
        has_run: Whether it has run a step, maybe before it lost its blocks.
    """

    keys: list[PrefixKey]
    granules: list[Granule] = field(default_factory=list)
    num_found: int = 0
    num_offered: int = 0
    last: Granule | None = None
    has_run: bool = False

    def forget(self) -> None:
        """Note that the request holds nothing of the cache."""
        self.granules = []
        self.num_found = self.num_offered = 0
        self.last = None


def keys_of(
    hash_ids: Sequence[int], prompt_len: int, granule_tokens: int, hash_tokens: int = 512
) -> list[PrefixKey]:
    """Return the keys of a prompt's whole granules, of as many as its hash ids name."""
    named = min(prompt_len, len(hash_ids) * hash_tokens)
    keys = []
    for place in range(named // granule_tokens):
        start, end = place * granule_tokens, (place + 1) * granule_tokens
        keys.append((place, tuple(hash_ids[start // hash_tokens : -(-end // hash_tokens)])))
    return keys
