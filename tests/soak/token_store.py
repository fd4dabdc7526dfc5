"""A cache that keeps who wrote each slot, on all ranks: what is read must be what was written."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bt_runner.errors import VerificationError
from bt_runner.requests import Request
from bt_runner.scheduler import SchedulerOutput
from bt_width import PAD_SLOT, BlockTableLayout, SlidingWindowSpec


class TokenStore:
    """One group's cache on all ranks; a slot holds the name of its token instead of a key.

    A wrong column, a stale row or a token on a rank too many shows when a token is read,
    however many steps after it was written.
    """

    def __init__(self, layouts: Sequence[BlockTableLayout], num_blocks: int) -> None:
        """Take a group's plan on each rank, and the size of its pool."""
        layout = layouts[0]
        self._layout = layout
        places = [layout.locate(position) for position in range(layout.limits.max_tokens)]
        self._ranks, self._columns, self._offsets = np.array(places, dtype=np.int64).T
        shape = (len(layouts), num_blocks * layout.block_size)
        self._names: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)

    def write(self, batch: SchedulerOutput, slots: Sequence[NDArray[np.int64]], group: int) -> None:
        """Write a step's tokens where ``slots`` of each rank say.

        Raises:
            VerificationError: A token lies on too few ranks or on too many.
        """
        names = np.concatenate(
            [_names(request, start, stop) for request, start, stop in _parts(batch)]
        )
        mapped = np.stack([of_rank[: len(names)] for of_rank in slots])
        is_written = mapped != PAD_SLOT
        wanted = 1 if self._layout.shards > 1 else len(slots)
        counts = is_written.sum(axis=0)
        if (counts != wanted).any():
            token = int((counts != wanted).argmax())
            raise VerificationError(
                f"group {group}: token {token} of the batch lies on {counts[token]} ranks, "
                f"not on {wanted}",
                group=group,
                expected=wanted,
                found=int(counts[token]),
            )
        for rank, wrote in enumerate(is_written):
            self._names[rank, mapped[rank, wrote]] = names[wrote]

    def read(self, batch: SchedulerOutput, tables: Sequence[NDArray[np.int32]], group: int) -> None:
        """Read every token that a step may see, through the table of each rank that keeps it.

        Raises:
            VerificationError: Something else lies where it is looked for.
        """
        for row, (request, start, stop) in enumerate(_parts(batch)):
            seen = slice(self._first_visible(start, stop), stop)
            expected = _names(request, seen.start, seen.stop)
            for rank, table in enumerate(tables):
                blocks = table[row, self._columns[seen]].astype(np.int64)
                slots = blocks * self._layout.kernel_block_size + self._offsets[seen]
                is_ours = self._ranks[seen] == rank if self._layout.shards > 1 else slice(None)
                wrong = (self._names[rank, slots] != expected)[is_ours]
                if wrong.any():
                    position = seen.start + int(np.arange(len(expected))[is_ours][wrong.argmax()])
                    raise VerificationError(
                        f"group {group}: position {position} of request "
                        f"{request.request_id} is not where rank {rank} looks for it",
                        group=group,
                        request=request.request_id,
                        position=position,
                        rank=rank,
                    )

    def _first_visible(self, start: int, stop: int) -> int:
        layout = self._layout
        if isinstance(layout.spec, SlidingWindowSpec):
            return max(start - layout.spec.window + 1, 0)
        if layout.slot_mode == "ring":
            # rejected drafts of the step before may have come round past this one's end
            last_written = stop + layout.limits.num_speculative_tokens
            return min(max(last_written - layout.block_size, 0), stop)
        return 0


def _parts(batch: SchedulerOutput) -> Iterator[tuple[Request, int, int]]:
    """Return each request of a batch, and which of its positions are computed."""
    return zip(batch.requests, batch.starts.tolist(), batch.seq_lens.tolist(), strict=True)


def _names(request: Request, start: int, stop: int) -> NDArray[np.int64]:
    """Return the names of a request's tokens; a request that starts over writes new ones."""
    life = zlib.crc32(f"{request.request_id} {request.num_preemptions}".encode()) >> 1
    return (np.int64(life) << 32) + np.arange(start, stop, dtype=np.int64) + 1
