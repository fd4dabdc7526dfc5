"""Request rows that begin with blocks other requests computed, and make room by dropping those."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.replay.sharing.granules import PrefixUse
from bt_runner.replay.sharing.prefix import PrefixCache
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.rows import RequestRows
from bt_width import BlockTableLayout


class SharedRows(RequestRows):
    """Rows over pools that a prefix cache draws from too.

    Attributes:
        prefixes: The cache.
    """

    def __init__(self, layouts: Sequence[BlockTableLayout], num_blocks: Sequence[int]) -> None:
        """Make one pool per group, and an empty cache over them."""
        super().__init__(layouts, num_blocks)
        self.prefixes = PrefixCache(self.layouts, self.pools)
        self._uses: dict[str, PrefixUse] = {}
        self._ended_step = 0

    def name_prefix(
        self, request: Request, hash_ids: Sequence[int], hash_tokens: int = 512
    ) -> None:
        """Say which tokens a request begins with, before it is scheduled."""
        self._uses[request.request_id] = self.prefixes.use_of(
            hash_ids, request.prompt_len, hash_tokens
        )

    def start(self, request: Request) -> None:
        """Begin a request's rows with what others computed; its last token is its own to do."""
        use = self._uses[request.request_id]
        # what was chosen before a preemption was never shared, so the prompt is all there is
        request.block_ids = self.prefixes.share(use, request.prompt_len - 1)
        request.num_computed = use.num_offered * self.prefixes.granule_tokens

    def extend(self, request: Request, seq_len: int) -> list[list[int]] | None:
        """Give a request what a step needs; where blocks are short, shared ones make room."""
        new_block_ids = super().extend(request, seq_len)
        if new_block_ids is not None or not self.prefixes.num_idle:
            return new_block_ids
        missing = [
            layout.num_blocks(seq_len) - len(held) - pool.num_free
            for layout, held, pool in zip(self.layouts, request.block_ids, self.pools, strict=True)
        ]
        if not self.prefixes.evict(missing, last_step=self._ended_step):
            return None
        for pool in self.pools:
            pool.complete(self._ended_step)
        return super().extend(request, seq_len)

    def offer(self, request: Request, num_computed: int) -> None:
        """Let others share what a running request has computed of its prompt."""
        self.prefixes.offer(self._uses[request.request_id], num_computed, request.block_ids)

    def release(self, request: Request, *, last_step: int) -> None:
        """Give back all blocks of a request; those it shares stay where they are."""
        self.prefixes.leave(self._uses[request.request_id])
        super().release(request, last_step=last_step)

    def recount(self, *, last_step: int) -> None:
        """Set the books right when no request holds a block; the cache keeps its own."""
        self.prefixes.leave_all(self._uses.values())
        super().recount(last_step=last_step)

    def shared_blocks(self, group: int) -> Sequence[int]:
        """Return the blocks of a group that the cache holds a reference to."""
        return self.prefixes.held_blocks(group)

    def forget(self, request: Request) -> None:
        """Drop what was said of a request that has ended."""
        del self._uses[request.request_id]

    def complete(self, step: int) -> None:
        """Note that all steps up to ``step`` have ended."""
        self._ended_step = step
        super().complete(step)
