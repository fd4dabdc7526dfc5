"""The rows of all groups: what each holds, what waits for the next launch, and the launch.

A row's state is the record that it would send. While it waits, that record says what the
launch shall do. Once a launch has carried it out, it is read as done: the row keeps all that
it holds. Which of the two it is follows from the row's generation, so that a launch
marks all rows that waited by one write, the next generation's number.

Nothing is ever torn. Whatever raises, at whatever instruction, a signal included:

- An edit is prepared aside and becomes true by one write, of ``pending``. It is then
  carried over to where it belongs, which may be done twice: the next call does it again
  where that was interrupted. Edits by lists are one entry of a dictionary each.
- A launch becomes true by one write, of ``_now``. Before it is sent it is marked as begun,
  so that the next call sees that one was begun and did not become true. Then everything
  still waits, and nothing is known of the device but what no launch could have written: the
  rows that waited may hold what they waited for, any batch row and any slot anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from bt_width import BlockTableLayout

from ._checks import INT32, NO_TOKENS, UINT32, EditArrays, EditChecks, Tokens
from ._packet import (
    BATCH_ROW_AT,
    COLUMN_TILE,
    FIELDS_AT,
    HEADER_INTS,
    NOWHERE,
    ROW_AT,
    TOKEN_TILE,
    Header,
    IntArray,
    Packet,
    PacketRing,
    RecordForm,
)
from ._storage import Storage
from .devices import Executor

MAX_COLUMN_PROGRAMS = 16_384
"""Column programs of a launch, at most; longer rows are written in turns by the same ones."""

_FEW_BLOCKS = 64
"""Records that write no more are not measured: one program writes each."""

_FEW_ROWS = 8
"""As many rows are looked at one by one faster than as an array."""

_NULL = NOWHERE
_STALE = -2
_NEVER = -1
_NO_REQUESTS = np.empty(0, np.int32)


class Edit(NamedTuple):
    """What a row gets at the next launch, by lists.

    Attributes:
        replaces: Whether the row loses what it holds.
        totals: Blocks it holds then, by group.
        ids: The blocks it gets, group by group.
        nulled: Blocks that are null then from the start of the row, by group; None where
            the edit leaves that as it is.
    """

    replaces: bool
    totals: list[int]
    ids: list[int] | IntArray
    nulled: list[int] | None


class Staged(NamedTuple):
    """The rows whose records wait for a launch.

    Attributes:
        generation: The generation that they wait in; in any other nothing waits.
        num_rows: How many wait.
        longest: At least the blocks that any of them writes in a group.
        packet: The packet that holds their ids, or None where there are none yet.
        used: Where its ids end.
    """

    generation: int
    num_rows: int
    longest: int
    packet: Packet | None
    used: int


_NOTHING_STAGED = Staged(_NEVER, 0, 0, None, 0)


class Batch(NamedTuple):
    """What the batch rows hold on the device; never changed in place.

    A batch row that holds all of a row and is extended with it *mirrors* it; a row is
    mirrored at most once. Every other batch row is null, or stale and written whole.

    Attributes:
        requests: The rows that were gathered, in batch order, [N] int32.
        key: Their bytes where nothing moves if they are gathered again, else None.
        row_of: The row that a batch row mirrors, null or stale, [R] int64.
        batch_row_of: The batch row that mirrors a row, or ``NOWHERE``, [R] int32.
        filled: Blocks that a batch row may hold that mirrors none, [R, G] int32.
        num_used: No batch row from here on holds anything.
        has_repeats: Whether a row is in the batch twice, and its second place stale.
    """

    requests: IntArray
    key: bytes | None
    row_of: IntArray
    batch_row_of: IntArray
    filled: IntArray
    num_used: int
    has_repeats: bool


class Now(NamedTuple):
    """What is true since the last launch.

    Attributes:
        launch: Launches so far.
        generation: Launches so far that carried edits out.
        batch: The batch rows.
        slots_used: No slot from here on is anything but padding.
    """

    launch: int
    generation: int
    batch: Batch
    slots_used: int


class _Prepared:
    """Room for one record a row while they are prepared; every view of it is made once.

    Attributes:
        lines: The records, each as one opaque value, [R].
        ints: The same memory, [R, size] int32.
        before, after, keep, blocks, base: The fields of ``RecordForm.fields``, [R].
        held, totals: What rows hold before and after, [R, G] uint32.
        held_lines, total_lines: The same, each row as one opaque value, [R].
        flat_totals: ``totals`` as flat int32.
    """

    def __init__(self, form: RecordForm, num_rows: int) -> None:
        self.ints = np.zeros((num_rows, form.size), np.int32)
        self.lines = self.ints.view(form.line).reshape(-1)
        fields = self.ints.view(form.fields).reshape(-1)
        self.before, self.after = fields["before"], fields["after"]
        self.keep, self.blocks, self.base = fields["keep"], fields["blocks"], fields["base"]
        self.held = np.zeros((num_rows, form.num_groups), np.uint32)
        self.held_lines = self.held.view(form.of_groups).reshape(-1)
        self.totals = np.zeros_like(self.held)
        self.total_lines = self.totals.view(form.of_groups).reshape(-1)
        self.flat_totals = self.totals.view(INT32).reshape(-1)


class _Move(NamedTuple):
    """How the batch changes with a launch: what it copies, and the batch before and after.

    Attributes:
        copies: Records that write batch rows whole.
        staying: ``batch_row_of`` without the batch rows that are written whole.
        batch: The batch after the launch.
    """

    copies: IntArray
    staying: IntArray
    batch: Batch


class DeviceRows:
    """The host's side of rows that live on the device.

    Attributes:
        storage: The device's side.
        checks: What may be asked of these rows.
    """

    def __init__(
        self,
        layouts: Sequence[BlockTableLayout],
        executor: Executor,
        num_blocks: Sequence[int] | None,
        *,
        num_packets: int,
    ) -> None:
        """Start with empty rows and a batch of none."""
        self.checks = EditChecks(layouts, num_blocks)
        self.storage = Storage(layouts, executor)
        self._executor = executor
        self._launch_step = executor.step_launch(self.storage)
        num_rows, num_groups = self.storage.num_rows, len(layouts)
        self._form = form = RecordForm(num_groups)
        # an edit of every row, a decode batch of all of them, and a prompt's ids
        self._ring = PacketRing(executor, num_rows, num_packets, num_rows * (form.size + 8) + 4096)
        self._ints = np.zeros((num_rows, form.size), np.int32)
        self._ints[:, ROW_AT] = np.arange(num_rows)
        self._lines = self._ints.view(form.line).reshape(-1)
        # for few ints faster than an array: every listed edit looks at what its row holds
        self._flat = self._ints.reshape(-1).data
        self._nothing = [0] * num_groups
        self._no_records = self._ints[:0]
        self._prepared = _Prepared(form, num_rows)
        self._room = np.tile(np.array(self.checks.blocks_per_row, np.uint32), (num_rows, 1))
        self._longest_row = max(self.checks.blocks_per_row)
        self._max_split = max(layout.addressing.kernel_blocks_per_block for layout in layouts)
        self._ordinals = np.arange(1, num_rows + 1, dtype=np.int32)
        self._scratch = np.zeros(num_rows, np.int32)

        self._edits: dict[int, Edit] = {}
        self._staged_in = np.full(num_rows, _NEVER, np.int64)
        self._waiting = np.zeros(num_rows, np.intp)
        self._staged = _NOTHING_STAGED
        self.pending: Callable[[], None] | None = None
        self._begun = _NEVER
        nothing = Batch(
            _NO_REQUESTS,
            b"",
            np.full(num_rows, _NULL, np.int64),
            np.full(num_rows, NOWHERE, np.int32),
            np.zeros((num_rows, num_groups), np.int32),
            0,
            False,
        )
        self._unknown = nothing._replace(
            key=None,
            row_of=np.full(num_rows, _STALE, np.int64),
            filled=self._room,
            num_used=num_rows,
        )
        self._now = Now(0, 0, nothing, 0)

    # what rows and the batch hold

    def held(self, row: int) -> list[int]:
        """Return the blocks that a row holds in each group, those that wait included."""
        self.finish()
        edit = self._edits.get(row)
        return self._held(row) if edit is None else edit.totals

    def _held(self, row: int) -> list[int]:
        """Return the same without what lists edited."""
        start = self._form.size * row + self._form.blocks.start
        return self._flat[start : start + self._form.num_groups].tolist()

    @property
    def requests(self) -> IntArray:
        """The rows of the batch as it was last gathered, [N] int32."""
        self._recover()
        return self._now.batch.requests

    def batch_blocks(self, num_reqs: int, group: int) -> IntArray:
        """Return the blocks that the first batch rows hold in a group, [num_reqs]; or more."""
        self._recover()
        batch = self._now.batch
        row_of = batch.row_of[:num_reqs]
        found = batch.filled[:num_reqs, group].copy()
        is_mirror = row_of >= 0
        records = self._records(row_of[is_mirror])
        found[is_mirror] = records[:, self._form.blocks_before][:, group]
        return found

    # edits

    def append(
        self, row: int, block_ids: Sequence[Sequence[int]], *, replace: bool, named: int
    ) -> None:
        """Give a row more blocks, or these in place of all it holds.

        Args:
            row: The row; it was checked.
            block_ids: One sequence of block ids a group.
            replace: Whether the row loses what it holds.
            named: What errors call the row.
        """
        if self.pending is not None:
            self.finish()
        edit, held = None, self._nothing
        if not replace:
            edit = self._edits.get(row)
            held = self._held(row) if edit is None else edit.totals
        totals, new = self.checks.listed_ids(named, block_ids, held)
        if edit is None:
            # as Edit(...) makes it, in half the time
            self._edits[row] = tuple.__new__(Edit, (replace, totals, new, None))
            return
        before = self._nothing if edit.replaces else self._held(row)
        ids: list[int] = []
        mine, more = list(edit.ids), list(new)
        for start, middle, end in zip(before, held, totals, strict=True):
            ids += mine[: middle - start]
            ids += more[: end - middle]
            del mine[: middle - start], more[: end - middle]
        self._edits[row] = edit._replace(totals=totals, ids=ids)

    def cleared(self, row: int) -> None:
        """Take everything from a row; a change may do it twice."""
        self._edits[row] = Edit(True, self._nothing, [], None)

    def null_prefix(self, row: int, group: int, num_blocks: int, *, named: int) -> None:
        """Null a row's first blocks, in total; row and group were checked."""
        totals = self.held(row)
        count = self.checks.prefix(named, group, num_blocks, totals[group])
        edit = self._edits.get(row)
        if edit is None:
            edit = Edit(False, totals, [], None)
        nulled = edit.nulled
        if nulled is None:
            held = self._ints[row, self._form.nulled].tolist()
            nulled = self._nothing if edit.replaces else held
        if count > nulled[group]:
            nulled = [*nulled[:group], count, *nulled[group + 1 :]]
            self._edits[row] = edit._replace(nulled=nulled)

    def stage(self, index: IntArray, edits: EditArrays, *, replace: bool) -> None:
        """Give rows their ids, in order: all of them, or none and an error.

        Args:
            index: The rows, [M] intp; one may wait already, and may repeat.
            edits: What they get, and what errors call them; its ends are changed.
            replace: Replace what the rows hold.
        """
        self.finish()
        if self._edits:
            self._flush()
        self._stage(index, edits, replace, None)

    def change(self, change: Callable[[], None]) -> None:
        """Make a change true by one write, and carry it over; it may be carried over twice."""
        self.finish()
        self.pending = change
        self.finish()

    # the launch

    def launch(
        self,
        batch: IntArray | None,
        requests: IntArray,
        tokens: Tokens | None,
        *,
        with_edits: bool = True,
    ) -> None:
        """Launch what waits, what moved in the batch, and the mapping of tokens.

        Without work there is no copy and no launch.

        Args:
            batch: Rows in batch order, [N] int32, or None to leave the batch as it is.
            requests: The row of each request of ``tokens``, [N] int32; they were checked.
            tokens: The tokens to map, or None to leave the slots alone. Slots of earlier
                steps at or above the bound are padded.
            with_edits: Whether edits are carried out, or go on waiting.
        """
        self._recover()
        now = self._now
        if batch is not None and now.batch.key == batch.tobytes():
            batch = None
        elif batch is not None:
            self.checks.requests(batch)
        if with_edits and self._edits:
            self._flush()
        staged = self._staged_now()
        num_edits = staged.num_rows if with_edits else 0
        if num_edits and now.batch.has_repeats and batch is None:
            # the other places of a row that is twice in the batch do not follow its edits
            batch = now.batch.requests
        edits, copies = self._no_records, self._no_records
        staying, after = now.batch.batch_row_of, now.batch
        if batch is not None:
            copies, staying, after = self._move(now.batch, batch)
        rows = self._waiting[:num_edits]
        if num_edits:
            edits = self._ints.take(rows, axis=0)
            edits[:, BATCH_ROW_AT] = staying.take(rows)

        num_entries = num_edits + len(copies)
        slots_end = max(tokens.bound, now.slots_used) if tokens else 0
        if not (num_entries or slots_end):
            self._now = now._replace(batch=after)
            return
        packet, used = staged.packet, staged.used
        if packet is None or not with_edits:
            packet = self._ring.take(packet)
            used = packet.ids_at
        mapped = tokens or NO_TOKENS
        more = num_entries * self._form.size + 2 * (len(requests) + 1 + mapped.bound)
        packet = self._ring.with_room(packet, used, more)
        packet.edit_of_row.fill(0)
        requests_at = used
        if num_edits:
            packet.edit_of_row[rows] = self._ordinals[:num_edits]
            requests_at = packet.put(used, edits)
        if len(copies):
            requests_at = packet.put(requests_at, copies)
        at = _put_tokens(packet, requests_at, requests, mapped)

        num_groups, token_tiles = self._form.num_groups, -(-slots_end // TOKEN_TILE)
        chunks = self._chunks(edits, copies, staged.longest)
        packet.write_header(
            num_groups=num_groups,
            entries_at=used,
            num_edits=num_edits,
            num_entries=num_entries,
            requests_at=requests_at,
            num_requests=len(requests),
            query_start_at=at.starts_at,
            positions_at=at.positions_at,
            max_tokens=mapped.bound,
            slots_end=slots_end,
            token_tiles=token_tiles,
            chunks=chunks,
        )
        programs = num_groups * (token_tiles + num_entries * chunks)
        self._begun = now.launch
        packet.send(at.end)
        self._launch_step(packet.device_ints, at.starts, at.positions, programs)
        self._now = Now(
            now.launch + 1,
            now.generation + with_edits,
            after,
            tokens.bound if tokens else now.slots_used,
        )

    def warm_up(self) -> None:
        """Launch a step without work, from a packet of its own, for what that compiles."""
        packet = Packet(self._executor, self.storage.num_rows, HEADER_INTS + len(self._ints))
        nothing = Header(*(0,) * len(Header._fields))
        packet.write_header(
            **nothing._replace(num_groups=self._form.num_groups, chunks=1)._asdict()
        )
        packet.send(packet.ids_at)
        self._launch_step(packet.device_ints, packet.device_ints, packet.device_longs, 1)
        self._executor.synchronize()

    def invalidate(self) -> None:
        """Any batch row and any slot may hold anything from now on."""
        now = self._now
        batch = self._unknown._replace(requests=now.batch.requests)
        self._now = now._replace(batch=batch, slots_used=self.storage.num_slots)

    def restore(self) -> None:
        """Write the groups and null the columns without a block, where they lie."""
        self._recover()
        self.invalidate()
        storage, form = self.storage, self._form
        storage.write_groups()
        records = self._records(np.arange(storage.num_rows))
        for number, group in enumerate(storage.groups):
            starts, ends = (
                torch.from_numpy(
                    records[:, field][:, number] * group.addressing.kernel_blocks_per_block
                ).to(storage.rows.device)
                for field in (form.nulled_before, form.blocks_before)
            )
            storage.null_outside(number, starts, ends)

    # after an interruption

    def finish(self) -> None:
        """Carry over the change that is true, where that is still to be done."""
        change = self.pending
        if change is not None:
            change()
            self.pending = None

    def _recover(self) -> None:
        """Make host and device agree again after anything that raised."""
        if self.pending is not None:
            self.finish()
        if self._begun != self._now.launch:
            return
        # a launch was begun: it may have read its packet and done any part of its work
        self._executor.synchronize()
        rows = self._waiting[: self._staged_now().num_rows]
        records = self._ints[rows]
        before, blocks = records[:, self._form.blocks_before], records[:, self._form.blocks]
        self._ints[rows, self._form.blocks_before] = np.maximum(before, blocks)
        self._now = self._now._replace(batch=self._unknown, slots_used=self.storage.num_slots)
        self._begun = _NEVER

    # staging

    def _staged_now(self) -> Staged:
        staged = self._staged
        return staged if staged.generation == self._now.generation else _NOTHING_STAGED

    def _records(self, rows: IntArray) -> IntArray:
        """Return the records of rows, as carried out where they do not wait: [M, size], a copy."""
        found = self._ints.take(rows, axis=0)
        staged = self._staged_now()
        if staged.num_rows:
            carried_out = np.flatnonzero(self._staged_in.take(rows) != staged.generation)
            part = found[carried_out]
            self._mark_carried_out(part)
            found[carried_out] = part
        else:
            self._mark_carried_out(found)
        return found

    def _mark_carried_out(self, records: IntArray) -> None:
        """Let records say that their rows keep what they hold."""
        fields = records.view(self._form.fields).reshape(-1)
        fields["keep"] = fields["blocks"]
        fields["before"] = fields["after"]

    def _flush(self) -> None:
        """Stage what was edited by lists, row by row at most once."""
        num_rows, num_groups = len(self._edits), self._form.num_groups
        index = np.fromiter(self._edits, np.intp, num_rows)
        replaced, totals_of, ids_of, nulled_of = zip(*self._edits.values(), strict=True)
        flat_totals = np.fromiter(chain.from_iterable(totals_of), np.int32, num_rows * num_groups)
        counts = flat_totals.reshape(num_rows, num_groups)
        replaces: bool | IntArray = replaced[0]
        if len(set(replaced)) > 1:
            replaces = np.array(replaced)
        if replaces is not True:
            held = self._ints.take(index, axis=0).view(self._form.fields).reshape(-1)["blocks"]
            held = held.copy().view(INT32).reshape(counts.shape)
            if replaces is not False:
                held[replaces] = 0
            counts -= held
        nulled = None
        if nulled_of.count(None) < num_rows:
            nulled = self._ints.take(index, axis=0)[:, self._form.nulled]
            for place, of_row in enumerate(nulled_of):
                if of_row is not None or replaced[place]:
                    nulled[place] = of_row or 0
        edits = EditArrays(
            index, counts, _joined_ids(ids_of), np.add.accumulate(counts.reshape(-1), 0, INT32)
        )
        self._stage(index, edits, replaces, nulled)

    def _stage(
        self,
        index: IntArray,
        edits: EditArrays,
        replaces: bool | IntArray,
        nulled: IntArray | None,
    ) -> None:
        """Let rows wait with these ids; what was edited by lists is contained or empty.

        Args:
            index: The rows, [M] intp.
            edits: What they get, and what errors call them; its ends are changed.
            replaces: Whether rows lose what they hold, for all or for each, [M].
            nulled: Blocks that are null from the start, [M, G]; None leaves them as they are.
        """
        num_rows = len(index)
        if not num_rows:
            return
        self._recover()
        staged, prepared = self._staged_now(), self._prepared
        if not self._are_new(index, staged):
            self._stage_again(index, edits, replaces, nulled)
            return
        named, counts, ids, ends = edits
        num_ids = len(ids)
        # good rows by now, so that none is clipped; other modes take a copy first
        self._lines.take(index, 0, prepared.lines[:num_rows], "clip")
        prepared.before[:num_rows] = prepared.after[:num_rows]
        new, room, totals = counts.view(UINT32), self._room[:num_rows], prepared.totals[:num_rows]
        if replaces is True:
            prepared.ints[:num_rows, self._form.keep] = 0
            prepared.ints[:num_rows, self._form.after] = 0
            totals[:] = new
        else:
            if replaces is not False:
                prepared.ints[:num_rows, self._form.after][replaces] = 0
            prepared.keep[:num_rows] = prepared.held_lines[:num_rows] = prepared.blocks[:num_rows]
            held = prepared.held[:num_rows]
            room = room - held
            np.add(held, new, totals)
        # a negative count is a large uint32
        if np.count_nonzero(new > room):
            before = prepared.ints[:num_rows, self._form.blocks].astype(np.int64)
            self.checks.counts(named, counts, before + counts)
        self.checks.ids(named, counts, ids)
        packet, used = self._packet_with(staged, ids)
        ends += used - num_ids
        ends -= prepared.flat_totals[: len(ends)]
        prepared.base[:num_rows] = ends.view(self._form.of_groups)
        prepared.blocks[:num_rows] = prepared.total_lines[:num_rows]
        if nulled is not None:
            prepared.ints[:num_rows, self._form.nulled] = nulled
        longest = num_ids if replaces is False and nulled is None else self._longest_row
        staged = Staged(
            self._now.generation,
            staged.num_rows + num_rows,
            max(staged.longest, longest),
            packet,
            used,
        )
        self.pending = partial(self._put, index, prepared.lines[:num_rows], index, staged)
        self.finish()

    def _put(self, index: IntArray, lines: IntArray, new: IntArray, staged: Staged) -> None:
        """Write the records of distinct rows, of which some are new among those that wait."""
        self._lines[index] = lines
        self._staged_in[new] = staged.generation
        self._waiting[staged.num_rows - len(new) : staged.num_rows] = new
        self._staged = staged
        self._edits = {}

    def _are_new(self, index: IntArray, staged: Staged) -> bool:
        """Whether rows are distinct, the table has them, and none of them waits."""
        if staged.num_rows and self._now.generation in self._staged_in.take(index):
            return False
        if len(index) <= _FEW_ROWS:
            rows = index.tolist()
            return max(rows) < len(self._scratch) and len(set(rows)) == len(rows)
        if not np.count_nonzero(index[1:] <= index[:-1]):
            return int(index[-1]) < len(self._scratch)
        if len(index) > len(self._scratch):
            return False
        ordinals = self._ordinals[: len(index)]
        self._scratch[index] = ordinals
        return not np.count_nonzero(self._scratch.take(index) != ordinals)

    def _packet_with(self, staged: Staged, ids: IntArray) -> tuple[Packet, int]:
        """Return the packet that is being filled, with more ids in it, and where they end."""
        packet, used = staged.packet, staged.used
        if packet is None:
            packet = self._ring.take()
            used = packet.ids_at
        packet = self._ring.with_room(packet, used, len(ids))
        return packet, packet.put(used, ids)

    def _stage_again(
        self,
        index: IntArray,
        edits: EditArrays,
        replaces: bool | IntArray,
        nulled: IntArray | None,
    ) -> None:
        """Stage rows that wait or repeat: first every row's first edit, then its second.

        What a row that waits gets more of is copied behind the packet's end, so that its
        fresh ids lie in one run; the ids left behind are dead and are sent all the same.
        """
        form, staged = self._form, self._staged_now()
        named, counts, ids, ends = edits
        rows, place = np.unique(index, return_inverse=True)
        records = self._records(rows)
        is_new = np.broadcast_to(np.asarray(replaces), index.shape)
        self.checks.counts(named, counts, counts)
        self.checks.ids(named, counts, ids)
        packet, used = self._packet_with(staged, ids)
        starts = used - len(ids) + ends.reshape(counts.shape) - counts
        left = np.arange(len(index))
        while left.size:
            firsts = np.unique(index[left], return_index=True)[1]
            wave = left[firsts]
            left = np.delete(left, firsts)
            found = records[place[wave]]
            emptied = found[is_new[wave]]
            emptied[:, form.keep] = 0
            emptied[:, form.after] = 0
            found[is_new[wave]] = emptied
            keep, blocks = found[:, form.keep], found[:, form.blocks]
            totals = blocks.astype(np.int64) + counts[wave]
            self.checks.counts(named[wave], counts[wave], totals)
            base = starts[wave] - keep
            if (blocks > keep).any():
                # what is fresh already and what is new, as one run
                runs = np.stack((found[:, form.base] + keep, starts[wave]), axis=-1)
                lengths = np.stack((blocks - keep, counts[wave]), axis=-1)
                sources, joined_at = run_places(runs, lengths)
                packet = self._ring.with_room(packet, used, len(sources))
                base = used + joined_at[..., 0] - keep
                used = packet.put(used, packet.ints[sources])
            found[:, form.base] = base
            found[:, form.blocks] = totals
            records[place[wave]] = found
        if nulled is not None:
            records[place, form.nulled] = nulled
        generation = self._now.generation
        new = rows[self._staged_in.take(rows) != generation]
        staged = Staged(generation, staged.num_rows + len(new), self._longest_row, packet, used)
        self.change(partial(self._put, rows, records.view(form.line).reshape(-1), new, staged))

    # the batch

    def _move(self, batch: Batch, requests: IntArray) -> _Move:
        """Return what changes where these rows are the batch, [N] int32.

        What is written whole mirrors nothing before, so that no edit writes it too.
        """
        form = self._form
        wanted = np.full(max(len(requests), batch.num_used), _NULL, np.int64)
        wanted[: len(requests)] = requests
        holds = batch.row_of[: len(wanted)]
        changed = np.flatnonzero(wanted != holds)
        wanted, holds = wanted[changed], holds[changed]
        left = holds >= 0
        filled = batch.filled.copy()
        filled[changed[left]] = self._records(holds[left])[:, form.blocks_before]
        staying = batch.batch_row_of.copy()
        staying[holds[left]] = NOWHERE

        is_row = wanted >= 0
        copies = self._records(np.maximum(wanted, 0))
        copies[~is_row, FIELDS_AT:] = 0
        copies[:, ROW_AT] = wanted
        copies[:, BATCH_ROW_AT] = changed
        filled_before = filled[changed]
        copies[:, form.blocks_before] = filled_before

        batch_row_of = staying.copy()
        unmirrored = is_row & (staying[wanted] == NOWHERE)
        # of a row that is twice in the batch, the last one mirrors it
        batch_row_of[wanted[unmirrored]] = changed[unmirrored]
        mirrors = is_row & (batch_row_of[wanted] == changed)
        row_of = batch.row_of.copy()
        row_of[changed] = np.where(mirrors, wanted, np.where(is_row, _STALE, _NULL))
        filled[changed] = copies[:, form.blocks]
        has_repeats = not np.array_equal(mirrors, is_row)
        # where an empty row takes the place of an empty one there is nothing to write
        writes = copies[:, form.after].any(axis=1) | filled_before.any(axis=1)
        after = Batch(
            requests.copy(),
            None if has_repeats else requests.tobytes(),
            row_of,
            batch_row_of,
            filled,
            len(requests),
            has_repeats,
        )
        return _Move(copies[writes], staying, after)

    def _chunks(self, edits: IntArray, copies: IntArray, longest: int) -> int:
        """Return how many programs share a record's columns; any number would be right."""
        if len(copies) or longest > _FEW_BLOCKS:
            longest = self._longest(edits, copies)
        columns = longest * self._max_split
        if columns <= COLUMN_TILE:
            return 1
        num_entries = len(edits) + len(copies)
        most = MAX_COLUMN_PROGRAMS // (num_entries * self._form.num_groups)
        return max(1, min(-(-columns // COLUMN_TILE), most))

    def _longest(self, edits: IntArray, copies: IntArray) -> int:
        """Return the most blocks that one of these records writes in a group."""
        form, longest = self._form, 0
        if len(edits):
            end = np.maximum(edits[:, form.blocks], edits[:, form.blocks_before])
            end -= edits[:, form.keep]
            if np.count_nonzero(edits[:, form.nulled]):
                end += np.maximum(edits[:, form.nulled] - edits[:, form.nulled_before], 0)
            longest = int(np.maximum.reduce(end, None))
        if len(copies):
            longest = max(longest, int(copies[:, form.blocks].max()))
            longest = max(longest, int(copies[:, form.blocks_before].max()))
        return longest


class _TokensAt(NamedTuple):
    """Where a launch finds the tokens: in the packet, or in the caller's tensors.

    Attributes:
        starts: What holds the query starts, on the device.
        starts_at: Where in it they start.
        positions: What holds the positions, on the device.
        positions_at: Where in it they start, in int64s.
        end: Where the packet ends.
    """

    starts: torch.Tensor
    starts_at: int
    positions: torch.Tensor
    positions_at: int
    end: int


def _put_tokens(packet: Packet, at: int, requests: IntArray, tokens: Tokens) -> _TokensAt:
    """Write the requests, and what of the tokens is on the host."""
    end = packet.put(at, requests)
    starts, starts_at = tokens.starts, 0
    if isinstance(starts, np.ndarray):
        starts_at, end = end, packet.put(end, starts)
        starts = packet.device_ints
    positions, positions_at = tokens.positions, 0
    if isinstance(positions, np.ndarray):
        positions_at = (end + 1) // 2
        positions_end = positions_at + tokens.bound
        if len(positions) > tokens.bound:
            positions = positions[: tokens.bound]
        packet.longs[positions_at:positions_end] = positions
        positions, end = packet.device_longs, 2 * positions_end
    return _TokensAt(starts, starts_at, positions, positions_at, end)


def _joined_ids(ids_of: Sequence[list[int] | IntArray]) -> IntArray:
    """Return all rows' ids, row by row."""
    if set(map(type, ids_of)) == {list}:
        return np.array(list(chain.from_iterable(ids_of)), np.int32)
    return np.concatenate([np.asarray(ids, np.int32) for ids in ids_of])


def run_places(starts: IntArray, lengths: IntArray) -> tuple[IntArray, IntArray]:
    """Return every place of many runs, one after the other, and where each run then starts.

    Args:
        starts: First place of each run, of any shape.
        lengths: Places of each run, of that shape.
    """
    flat = lengths.reshape(-1).astype(np.int64)
    ends = flat.cumsum()
    moved_to = ends - flat
    total = int(ends[-1]) if ends.size else 0
    places = np.arange(total) + np.repeat(starts.reshape(-1) - moved_to, flat)
    return places, moved_to.reshape(lengths.shape)
