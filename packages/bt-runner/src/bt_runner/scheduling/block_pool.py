"""One group's blocks: who may take which, and when a freed one may be taken again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from bt_runner.errors import BadInputError, PoolExhaustedError
from bt_width import NULL_BLOCK


class BlockPool:
    """Hands out block ids and counts their references.

    A block whose last reference goes is not free at once: steps that were launched
    before may still touch it. It comes back when the last of them has ended.

    Attributes:
        num_blocks: Blocks of the cache, the null block included.
        peak_used: The most blocks that were in use or cooling at a time.
    """

    def __init__(self, num_blocks: int) -> None:
        """Fill the pool with every block but the null block.

        Raises:
            BadInputError: There is no block besides the null block.
        """
        if num_blocks < 2:
            raise BadInputError(
                f"a pool of {num_blocks} blocks has none to give: block {NULL_BLOCK} is reserved; "
                "make it at least 2",
                num_blocks=num_blocks,
            )
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        self._cooling: deque[tuple[int, int]] = deque()
        self._completed = 0
        self._references: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return len(self._references)

    @property
    def num_cooling(self) -> int:
        """Blocks that nobody holds, but that a step under way may still touch."""
        return len(self._cooling)

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    def references(self, block_id: int) -> int:
        """Return how many hold a block; 0 where it is free or cooling."""
        return self._references.get(block_id, 0)

    def reference_counts(self) -> list[int]:
        """Return ``references`` of every block, the null block's 0 included."""
        return [self.references(block_id) for block_id in range(self.num_blocks)]

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, with one reference each.

        Raises:
            PoolExhaustedError: Fewer are free; none is taken.
        """
        if count > len(self._free):
            raise PoolExhaustedError(
                f"{count} blocks were asked, {len(self._free)} of {self.capacity} are free",
                asked=count,
                free=len(self._free),
            )
        ids = [self._free.popleft() for _ in range(count)]
        for block_id in ids:
            self._references[block_id] = 1
        self.peak_used = max(self.peak_used, self.capacity - len(self._free))
        return ids

    def retain(self, block_ids: Sequence[int]) -> None:
        """Add a reference to blocks that are in use.

        Raises:
            BadInputError: One of them is not in use; nothing is changed.
        """
        self._require_used(block_ids)
        self._references.update(block_ids)

    def release(self, block_ids: Sequence[int], *, last_step: int) -> None:
        """Drop a reference of each block.

        Args:
            block_ids: The blocks.
            last_step: The last step launched, the last one that may still touch them.

        Raises:
            BadInputError: One of them is not in use so often; nothing is changed.
        """
        self._require_used(block_ids)
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                del self._references[block_id]
                self._cooling.append((last_step, block_id))
        self.complete(self._completed)

    def complete(self, step: int) -> None:
        """Free the blocks that only steps up to ``step`` could touch: they have ended."""
        self._completed = max(self._completed, step)
        while self._cooling and self._cooling[0][0] <= self._completed:
            self._free.append(self._cooling.popleft()[1])

    def recount(self, held: Iterable[int], *, last_step: int) -> None:
        """Set the books by who holds what, whatever they said: something broke off in between.

        Args:
            held: The blocks that somebody holds, one for each reference.
            last_step: The last step that may still touch any of the others.
        """
        self._references = Counter(held)
        self._free = deque()
        self._cooling = deque(
            (last_step, block_id)
            for block_id in range(NULL_BLOCK + 1, self.num_blocks)
            if block_id not in self._references
        )
        self.complete(self._completed)

    def _require_used(self, block_ids: Sequence[int]) -> None:
        for block_id, count in Counter(block_ids).items():
            if self.references(block_id) < count:
                raise BadInputError(
                    f"block {block_id} is held {self.references(block_id)} times, not {count}",
                    block_id=block_id,
                )
