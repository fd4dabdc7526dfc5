"""Counts references to one cache group's blocks and decides which block is given next.

It knows no requests and no tokens. A block is in one of three states:

    held      has references
    cooling   no references, but a step that was launched before may still touch it
    free      ``allocate`` may give it

A block with a hash is *findable* in all three, with what was computed into it: ``acquire``
brings it back to use until ``allocate`` needs its room. Blocks without a hash are given
first, then findable ones, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from bt_runner.errors import BadInputError, PoolExhaustedError
from bt_width import NULL_BLOCK
from bt_width.errors import counted

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32]
BlockHash: TypeAlias = bytes
"""What a findable block is found by; equal only where all that was computed into it is."""

_Ids: TypeAlias = npt.NDArray[np.int32]
_Tickets: TypeAlias = npt.NDArray[np.int64]

_NO_TICKET = 0
_MIN_SCAN = 64


class _Cooling(NamedTuple):
    """Blocks of one ``release``.

    Attributes:
        last_step: The last step that may touch them.
        ids: The blocks.
        tickets: What each was given then; a block that has another by now is elsewhere.
    """

    last_step: int
    ids: _Ids
    tickets: _Tickets


class _Queue:
    """Free blocks, the next one to give first.

    A block that leaves from the middle only loses its ticket, so that leaving costs
    nothing here; its entry is skipped later.
    """

    def __init__(self, num_blocks: int) -> None:
        # twice as many entries as blocks: moving the live ones to the front pays for itself
        self._ids = np.empty(2 * num_blocks, np.int32)
        self._tickets = np.empty(2 * num_blocks, np.int64)
        self._head = self._tail = 0

    def clear(self) -> None:
        """Forget all entries."""
        self._head = self._tail = 0

    def push(self, ids: _Ids, tickets: _Tickets, ticket_of: _Tickets) -> None:
        """Add blocks at the end."""
        if self._tail + len(ids) > len(self._ids):
            entries = slice(self._head, self._tail)
            live = ticket_of[self._ids[entries]] == self._tickets[entries]
            kept_ids, kept_tickets = self._ids[entries][live], self._tickets[entries][live]
            self._head, self._tail = 0, len(kept_ids)
            self._ids[: self._tail], self._tickets[: self._tail] = kept_ids, kept_tickets
        entries = slice(self._tail, self._tail + len(ids))
        self._ids[entries], self._tickets[entries] = ids, tickets
        self._tail += len(ids)

    def pop(self, count: int, ticket_of: _Tickets) -> _Ids:
        """Take ``count`` blocks from the front; there are as many."""
        taken: list[_Ids] = []
        scan = count
        while True:
            entries = slice(self._head, min(self._head + scan, self._tail))
            ids = self._ids[entries]
            live = (ticket_of[ids] == self._tickets[entries]).nonzero()[0][:count]
            taken.append(ids[live])
            count -= len(live)
            if not count:
                self._head += int(live[-1]) + 1 if len(live) else 0
                return taken[0] if len(taken) == 1 else np.concatenate(taken)
            self._head = entries.stop
            scan = max(count, _MIN_SCAN)


class BlockPool:
    """Gives out the blocks of one cache group.

    Every call takes as many blocks as the caller has and costs a few array operations;
    only losing or gaining a hash costs a dictionary entry per block. Null blocks among the
    ids are skipped everywhere, so a row can be passed as it is.

    One thread at a time may use a pool.

    Attributes:
        num_blocks: Blocks of the cache, the null block included.
        num_free: Blocks that can be allocated now, findable ones included.
        num_cooling: Blocks that come back with a later ``complete``.
        peak_used: The most blocks that were held or cooling at a time.
    """

    def __init__(self, num_blocks: int) -> None:
        """Start with every block free but the null block.

        Raises:
            BadInputError: The pool has only the null block.
        """
        if num_blocks < 2:
            raise BadInputError(
                f"a pool of {counted(num_blocks, 'block')} has none to give: block {NULL_BLOCK} is "
                "reserved; make it at least 2",
                num_blocks=num_blocks,
            )
        self.num_blocks = num_blocks
        self.peak_used = 0
        self._references = np.zeros(num_blocks, np.int32)
        # the entry that speaks for a block: of a queue where above 0, of those that cool below
        self._ticket_of = np.full(num_blocks, _NO_TICKET, np.int64)
        self._is_findable = np.zeros(num_blocks, bool)
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self._plain = _Queue(num_blocks)
        self._findable = _Queue(num_blocks)
        self._cooling: list[_Cooling] = []
        self._next_ticket = _NO_TICKET + 1
        self._completed = 0
        self.num_free = self.num_cooling = self._num_plain = 0
        self._cool(np.arange(NULL_BLOCK + 1, num_blocks, dtype=np.int32), last_step=0)
        self.complete(0)

    @property
    def capacity(self) -> int:
        """Blocks that can be held at once."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        """Blocks with references."""
        return self.capacity - self.num_free - self.num_cooling

    @property
    def num_findable(self) -> int:
        """Blocks that have a hash."""
        return len(self._hash_of)

    @property
    def references(self) -> npt.NDArray[np.int32]:
        """How many hold each block, by block id; read-only, and always of now."""
        view = self._references.view()
        view.flags.writeable = False
        return view

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """Take ``count`` free blocks, with one reference each; what was in them is lost.

        Raises:
            PoolExhaustedError: Fewer are free; none is taken.
        """
        if count > self.num_free:
            raise PoolExhaustedError(
                f"{count} blocks were asked, {self.num_free} of {self.capacity} are free",
                asked=count,
                free=self.num_free,
            )
        num_plain = min(count, self._num_plain)
        ids = self._plain.pop(num_plain, self._ticket_of)
        if count > num_plain:
            evicted = self._findable.pop(count - num_plain, self._ticket_of)
            for block_id in evicted.tolist():
                del self._block_of[self._hash_of.pop(block_id)]
            self._is_findable[evicted] = False
            ids = np.concatenate((ids, evicted))
        self._num_plain -= num_plain
        self.num_free -= count
        self._ticket_of[ids] = _NO_TICKET
        self._references[ids] = 1
        self.peak_used = max(self.peak_used, self.capacity - self.num_free)
        return ids

    def acquire(self, block_ids: BlockIds) -> None:
        """Add a reference to blocks that are held or findable.

        Raises:
            BadInputError: A block is neither; nothing is changed.
        """
        ids = _real(block_ids)
        unused = self._references[ids] == 0
        if unused.any():
            back = np.unique(ids[unused])
            lost = back[~self._is_findable[back]]
            if len(lost):
                raise BadInputError(
                    f"block {lost[0]} is neither held nor findable: what was in it is lost",
                    block_id=int(lost[0]),
                )
            num_free = int(np.count_nonzero(self._ticket_of[back] > _NO_TICKET))
            self.num_free -= num_free
            self.num_cooling -= len(back) - num_free
            self._ticket_of[back] = _NO_TICKET
            self.peak_used = max(self.peak_used, self.capacity - self.num_free)
        np.add.at(self._references, ids, 1)

    def release(self, block_ids: BlockIds, *, last_step: int) -> None:
        """Drop a reference of each block.

        Those without references cool until ``last_step`` has ended. They are given
        again in the reverse of this order: of a row, the end goes before the beginning,
        which more requests may share.

        Args:
            block_ids: The blocks, one entry for each reference.
            last_step: The last step launched, the last one that may still touch them.

        Raises:
            BadInputError: A block is not held so often; nothing is changed.
        """
        ids = _real(block_ids)
        np.subtract.at(self._references, ids, 1)
        left = self._references[ids]
        if (left < 0).any():
            np.add.at(self._references, ids, 1)
            block_id = int(ids[np.argmax(left < 0)])
            count = int(np.count_nonzero(ids == block_id))
            raise BadInputError(
                f"block {block_id} is held {self._references[block_id]} times, not {count}",
                block_id=block_id,
            )
        self._cool(ids[left == 0][::-1], last_step)
        if last_step <= self._completed:
            self.complete(self._completed)

    def complete(self, step: int) -> None:
        """Free the blocks that only steps up to ``step`` could touch: they have ended."""
        self._completed = max(self._completed, step)
        if not any(batch.last_step <= self._completed for batch in self._cooling):
            return
        cooling, self._cooling = self._cooling, []
        for batch in cooling:
            if batch.last_step <= self._completed:
                self._free(batch.ids, batch.tickets)
            else:
                self._cooling.append(batch)

    def register(self, block_id: int, block_hash: BlockHash) -> None:
        """Let a held block be found by what was computed into it.

        A block that has a hash keeps it, and so does the block that was first with one.

        Raises:
            BadInputError: The block is not held; nothing is changed.
        """
        if not self._references[block_id]:
            raise BadInputError(f"block {block_id} is not held", block_id=block_id)
        if block_id in self._hash_of:
            return
        if self._block_of.setdefault(block_hash, block_id) == block_id:
            self._hash_of[block_id] = block_hash
            self._is_findable[block_id] = True

    def lookup(self, block_hash: BlockHash) -> int | None:
        """Return the block with that hash; it may be held, cooling or free."""
        return self._block_of.get(block_hash)

    def recount(self, references: BlockIds, *, last_step: int) -> None:
        """Set the reference counts whatever they were, after a failed step.

        No block is findable afterwards, because a failed step may have computed
        less into a block than its hash says.

        Args:
            references: The blocks that are held, one entry for each reference.
            last_step: The last step that may still touch any of the others.
        """
        counts = np.bincount(_real(references), minlength=self.num_blocks)
        self._hash_of, self._block_of = {}, {}
        self._is_findable[:] = False
        self._ticket_of[:] = _NO_TICKET
        self._plain.clear()
        self._findable.clear()
        self._cooling = []
        self.num_free = self.num_cooling = self._num_plain = 0
        self._references[:] = counts
        unused = np.flatnonzero(counts[NULL_BLOCK + 1 :] == 0) + NULL_BLOCK + 1
        self._cool(unused.astype(np.int32), last_step)
        self.complete(self._completed)

    def _cool(self, ids: _Ids, last_step: int) -> None:
        """Note that these blocks have no references left; one may occur twice."""
        if not len(ids):
            return
        tickets = np.arange(self._next_ticket, self._next_ticket + len(ids))
        self._next_ticket += len(ids)
        self._ticket_of[ids] = -tickets
        # the last entry of a block that occurs twice speaks for it
        once = self._ticket_of[ids] == -tickets
        self._cooling.append(_Cooling(last_step, ids, tickets))
        self.num_cooling += int(np.count_nonzero(once))

    def _free(self, ids: _Ids, tickets: _Tickets) -> None:
        """Let blocks be given that have cooled; some may be elsewhere by now."""
        still_cooling = self._ticket_of[ids] == -tickets
        if not still_cooling.all():
            ids, tickets = ids[still_cooling], tickets[still_cooling]
        self._ticket_of[ids] = tickets
        self.num_free += len(ids)
        self.num_cooling -= len(ids)
        findable = self._is_findable[ids]
        num_findable = int(np.count_nonzero(findable))
        self._num_plain += len(ids) - num_findable
        if num_findable:
            self._findable.push(ids[findable], tickets[findable], self._ticket_of)
            ids, tickets = ids[~findable], tickets[~findable]
        self._plain.push(ids, tickets, self._ticket_of)


def _real(block_ids: BlockIds) -> _Ids:
    ids = np.asarray(block_ids, np.int32)
    is_real = ids != NULL_BLOCK
    return ids if is_real.all() else ids[is_real]
