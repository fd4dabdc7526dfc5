"""Blocks that requests with equal beginnings share; it knows no rows and no steps.

A prefix is cut into granules, each a whole number of blocks of every group, so
that a hit never ends inside a block of one of them (vllm-ascend #12502). The cache
holds one reference to each block it keeps. A block that nobody else holds stays,
until room is short: then what was used least recently goes, ends before beginnings.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from bt_runner.replay.sharing.granules import Granule, PrefixKey, PrefixUse, keys_of
from bt_runner.scheduling.block_pool import BlockPool
from bt_width import BlockTableLayout


class PrefixCache:
    """Finds, keeps and drops shared granules.

    Attributes:
        granule_tokens: Tokens of a granule; 0 where a group has no blocks to share.
        hit_tokens: Prompt tokens that requests shared with others when they first ran.
        rehit_tokens: Prompt tokens that they found again after they had lost their blocks.
    """

    def __init__(self, layouts: Sequence[BlockTableLayout], pools: Sequence[BlockPool]) -> None:
        """Start empty."""
        # a state or a ring is written on and on, so such a group shares nothing
        shares = all(layout.kind == "attention" for layout in layouts)
        sizes = [layout.tokens_per_block for layout in layouts]
        self.granule_tokens = math.lcm(*sizes) if shares and sizes else 0
        self.hit_tokens = 0
        self.rehit_tokens = 0
        self._blocks_per_granule = [self.granule_tokens // size for size in sizes]
        self._pools = tuple(pools)
        self._granules: dict[PrefixKey, Granule] = {}
        self._idle: OrderedDict[PrefixKey, Granule] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Granules that no request holds."""
        return len(self._idle)

    def use_of(self, hash_ids: Sequence[int], prompt_len: int, hash_tokens: int = 512) -> PrefixUse:
        """Return a request's keys, for as many whole granules as its hash ids name."""
        size = self.granule_tokens
        return PrefixUse(keys_of(hash_ids, prompt_len, size, hash_tokens) if size else [])

    def share(self, use: PrefixUse, max_tokens: int) -> list[list[int]]:
        """Give a request that holds nothing the granules that are here.

        Args:
            use: The request's part in the cache.
            max_tokens: Tokens that it may be spared.

        Returns:
            The blocks it holds now, group by group; a reference to each is taken.
        """
        found = self._find(use.keys[: max_tokens // self.granule_tokens]) if use.keys else []
        for granule in found:
            self._idle.pop(granule.key, None)
            granule.num_users += 1
        use.granules = found
        use.num_found = use.num_offered = len(found)
        use.last = found[-1] if found else None
        shared = [
            [block for granule in found for block in granule.block_ids[group]]
            for group in range(len(self._pools))
        ]
        for pool, ids in zip(self._pools, shared, strict=True):
            pool.retain(ids)
        return shared

    def offer(self, use: PrefixUse, num_computed: int, block_ids: Sequence[Sequence[int]]) -> None:
        """Keep the granules that a request has computed since it last offered some."""
        if not use.keys:
            return
        if use.has_run:
            self.rehit_tokens += use.num_found * self.granule_tokens
        else:
            self.hit_tokens += use.num_found * self.granule_tokens
        use.has_run = True
        use.num_found = 0
        computed = min(num_computed // self.granule_tokens, len(use.keys))
        for place in range(use.num_offered, computed):
            if place < len(use.keys):
                self._keep(use, place, block_ids)
        use.num_offered = max(use.num_offered, computed)

    def leave(self, use: PrefixUse) -> None:
        """Note that a request gave back its blocks."""
        for granule in reversed(use.granules):
            granule.num_users -= 1
            if granule.num_users == 0:
                self._idle[granule.key] = granule
        use.forget()

    def leave_all(self, uses: Iterable[PrefixUse]) -> None:
        """Note that no request holds a block any more, whatever they had to do with the cache."""
        for use in uses:
            use.forget()
        # a granule is kept after its parent, and goes before it
        for granule in reversed(self._granules.values()):
            granule.num_users = 0
            self._idle.setdefault(granule.key, granule)

    def evict(self, num_blocks: Sequence[int], *, last_step: int) -> bool:
        """Drop granules that no request holds, until so many more blocks come back.

        Args:
            num_blocks: Blocks wanted of each group; none where it is not above 0.
            last_step: The last step that may still read them.

        Returns:
            Whether there were enough; otherwise nothing is dropped.
        """
        wanted = max(
            -(-count // per_granule) if count > 0 else 0
            for count, per_granule in zip(num_blocks, self._blocks_per_granule, strict=True)
        )
        if wanted > len(self._idle):
            return False
        for _ in range(wanted):
            key, granule = self._idle.popitem(last=False)
            del self._granules[key]
            for pool, ids in zip(self._pools, granule.block_ids, strict=True):
                pool.release(ids, last_step=last_step)
        return True

    def held_blocks(self, group: int) -> list[int]:
        """Return the blocks of a group that the cache holds a reference to."""
        return [block for granule in self._granules.values() for block in granule.block_ids[group]]

    def _find(self, keys: Sequence[PrefixKey]) -> list[Granule]:
        found: list[Granule] = []
        parent: Granule | None = None
        for key in keys:
            granule = self._granules.get(key)
            if granule is None or granule.parent is not parent:
                break
            found.append(granule)
            parent = granule
        return found

    def _keep(self, use: PrefixUse, place: int, block_ids: Sequence[Sequence[int]]) -> None:
        key = use.keys[place]
        granule = self._granules.get(key)
        if granule is not None and granule.parent is not use.last:
            # equal ids after different beginnings: what follows is not the same text
            use.keys = use.keys[:place]
            return
        if granule is None:
            blocks = tuple(
                tuple(ids[place * count : (place + 1) * count])
                for ids, count in zip(block_ids, self._blocks_per_granule, strict=True)
            )
            granule = Granule(key, use.last, blocks, num_users=1)
            for pool, ids in zip(self._pools, blocks, strict=True):
                pool.retain(ids)
            self._granules[key] = granule
            use.granules.append(granule)
        # else somebody computed the same tokens first, and this copy stays private
        use.last = granule
