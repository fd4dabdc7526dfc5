"""Caches of one rank that hold names instead of numbers: what is read must be what was computed.

A wrong column, a stale row, a block that another request writes or a token on the wrong rank
shows when a token or a state is read, however many steps after it was written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.simulator.names import NO_NAME

from bt_builders import MambaMetadata
from bt_runner.arrays import Flags, Ints, Tokens, ragged
from bt_runner.block_pool import BlockPool
from bt_runner.errors import VerificationError
from bt_runner.scheduler import SchedulerOutput
from bt_width import NULL_BLOCK, PAD_SLOT, BlockTableLayout, SlidingWindowSpec


class _Memory:
    """One group's cache.

    Attributes:
        layout: Its plan.
        names: What each place holds.
    """

    def __init__(self, group: str, layout: BlockTableLayout, pool: BlockPool, size: int) -> None:
        self.names: Ints = np.full(size, NO_NAME, np.int64)
        self._group = group
        self.layout = layout
        self._pool = pool

    def forget(self) -> None:
        """Lose everything: a step failed, and nothing it wrote may be trusted."""
        self.names[:] = NO_NAME

    def _require_own(self, block_ids: Ints) -> None:
        """Refuse to write into a block that more than one request holds, or none."""
        holders = self._pool.references[block_ids]
        if (holders != 1).any():
            place = int((holders != 1).argmax())
            block = int(block_ids[place])
            raise self._fault(f"block {block} is written, and {holders[place]} hold it")

    def _put(self, places: Ints, block_ids: Ints, names: Ints) -> None:
        """Write names into blocks that one request holds alone, and no other can find."""
        self._require_own(block_ids)
        changes = self._pool._is_findable[block_ids] & (self.names[places] != names)
        if changes.any():
            raise self._fault(f"block {block_ids[changes.argmax()]} changes, and can be found")
        self.names[places] = names

    def _fault(self, what: str, **details: object) -> VerificationError:
        return VerificationError(f"group {self._group}: {what}", group=self._group, **details)


class TokenMemory(_Memory):
    """A group whose slots hold tokens."""

    def __init__(self, group: str, layout: BlockTableLayout, pool: BlockPool) -> None:
        """Start empty."""
        super().__init__(group, layout, pool, pool.num_blocks * layout.block_size)
        places = [layout.locate(position) for position in range(layout.limits.max_tokens)]
        self._ranks, self._columns, self._offsets = np.array(places, np.int64).T

    def write(self, slots: Ints, names: Ints) -> Flags:
        """Write a step's tokens where ``slots`` say; return which of them lie on this rank."""
        is_ours = slots != PAD_SLOT
        ours = slots[is_ours]
        self._put(ours, ours // self.layout.block_size, names[is_ours])
        written: Flags = is_ours
        return written

    def read(self, batch: SchedulerOutput, table: Tokens, names: Sequence[Ints]) -> None:
        """Read every token that a step may see, where this rank keeps it.

        Args:
            batch: The step's (N).
            table: [N or more, W]; kernel blocks.
            names: Of each request; those of its first tokens, and of none.

        Raises:
            VerificationError: Something else lies where a token is looked for.
        """
        first, ends = self._first_visible(batch), batch.seq_lens
        places = np.repeat(np.arange(len(first)), ends - first)
        positions = ragged(first, ends - first)
        spans = zip(names, first.tolist(), ends.tolist(), strict=True)
        wanted = np.concatenate([of_text[start + 1 : end + 1] for of_text, start, end in spans])
        blocks = table[places, self._columns[positions]].astype(np.int64)
        slots = blocks * self.layout.kernel_block_size + self._offsets[positions]
        wrong = self.names[slots] != wanted
        rank = self.layout.limits.context_parallel.rank
        if self.layout.shards > 1:
            wrong &= self._ranks[positions] == rank
        if wrong.any():
            token = int(wrong.argmax())
            position, name = int(positions[token]), batch.requests[places[token]].request_id
            raise self._fault(
                f"position {position} of request {name} is not where rank {rank} looks for it",
                request=name,
                position=position,
                rank=rank,
            )

    def _first_visible(self, batch: SchedulerOutput) -> Ints:
        layout, starts, stops = self.layout, batch.starts, batch.seq_lens
        if isinstance(layout.spec, SlidingWindowSpec):
            return np.maximum(starts - layout.spec.window + 1, 0)
        if layout.slot_mode == "ring":
            # rejected drafts of the step before may have come round past this one's end
            last_written = stops + layout.limits.num_speculative_tokens
            return np.minimum(np.maximum(last_written - layout.block_size, 0), stops)
        return np.zeros_like(starts)


class StateMemory(_Memory):
    """A group whose blocks hold states: the builder says which are read and written."""

    def __init__(self, group: str, layout: BlockTableLayout, pool: BlockPool) -> None:
        """Start empty."""
        super().__init__(group, layout, pool, pool.num_blocks)

    def read(self, batch: SchedulerOutput, built: MambaMetadata, names: Sequence[Ints]) -> None:
        """Read the state that each request of a step goes on from.

        Raises:
            VerificationError: It is the state of other tokens, or there is none.
        """
        count = len(batch.rows)
        sources = built.states.source_ids[:count].cpu().numpy()
        has_state = built.states.has_initial_states[:count].cpu().numpy()
        pairs = zip(names, batch.starts.tolist(), strict=True)
        wanted = np.array([of_text[start] for of_text, start in pairs])
        wrong = has_state != (batch.starts > 0)
        wrong |= has_state & (self.names[sources] != wanted)
        if wrong.any():
            place = int(wrong.argmax())
            name, start = batch.requests[place].request_id, int(batch.starts[place])
            raise self._fault(
                f"request {name} goes on from a state that is not the one after {start} tokens",
                request=name,
                position=start,
            )

    def write(self, batch: SchedulerOutput, built: MambaMetadata, names: Sequence[Ints]) -> None:
        """Write the states that a step leaves: one after each token, of a chunk the last one.

        Raises:
            VerificationError: One has no block of its own.
        """
        state_ids = built.states.state_ids.cpu().numpy()
        num_decodes = built.decode.num_reqs
        targets, values = [], []
        counts = np.where(np.arange(len(names)) < num_decodes, batch.num_tokens, 1)
        for place, (of_text, count) in enumerate(zip(names, counts.tolist(), strict=True)):
            targets.append(state_ids[place, :count])
            values.append(of_text[len(of_text) - count :])
        block_ids = np.concatenate(targets)
        if (block_ids == NULL_BLOCK).any():
            raise self._fault("a state has no block to be written to")
        self._put(block_ids, block_ids, np.concatenate(values))

    def copy(self, source_ids: Ints, target_ids: Ints) -> None:
        """Copy states, now that drafts are decided; nothing where a target is the null block.

        A state at a block's end can be found since the step was launched, and stands there
        from now on.
        """
        is_copied = target_ids != NULL_BLOCK
        targets = target_ids[is_copied]
        self._require_own(targets)
        self.names[targets] = self.names[source_ids[is_copied]]
