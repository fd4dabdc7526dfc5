"""Decides which requests compute how many tokens in the next step; it knows no tensors.

First come, first served: requests that run go before those that wait, and where blocks are
short the one that came last gives up its own and starts over.

Who owns what:

    Scheduler          the order of requests: those that wait, those that run, their rows
    RunningRequests    the numbers of those that run, one entry a row
    KVCacheManager     the blocks of every row, and what tables are told of them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from bt_runner.arrays import Flags, Ints, Tokens
from bt_runner.errors import RequestRefusedError
from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.requests import FinishReason, Request, RunningRequests
from bt_width import ServingLimits


@dataclass(frozen=True, kw_only=True, eq=False)
class SchedulerOutput:
    """A step's batch: requests that decode, then those that prefill (N).

    Attributes:
        rows: [N]; -1 for padding.
        lives: [N]; requests that each row has had before this one; a step's tokens are for
            the request that was in the row then.
        requests: [N] object.
        starts: [N]; position of the first token that is computed.
        num_known: [N]; tokens of the request that are computed. The last of them may still
            be on its way to the host.
        num_drafts: [N]; guesses that are computed after them.
        num_choices: [N]; last positions after which a token is chosen: none in the midst of
            a prompt.
        is_prefilling: [N]; whether the request has no state yet, or lacks known tokens.
        num_on_host: [N]; leading tokens that the host knows, drafts included.
    """

    rows: Ints
    lives: Ints
    requests: NDArray[np.object_]
    starts: Ints
    num_known: Ints
    num_drafts: Ints
    num_choices: Ints
    is_prefilling: Flags
    num_on_host: Ints

    @cached_property
    def num_tokens(self) -> Ints:
        """[N]; tokens computed, drafts included."""
        return self.num_known + self.num_drafts

    @cached_property
    def seq_lens(self) -> Ints:
        """[N]; tokens of each request after the step, drafts included."""
        return self.starts + self.num_tokens


class StepOutput(NamedTuple):
    """What one step gave one request.

    Attributes:
        request_id: The request.
        new_tokens: Tokens chosen for it.
        finish_reason: Why it ended, or None.
    """

    request_id: str
    new_tokens: list[int]
    finish_reason: FinishReason | None


class StepOutputs(Sequence[StepOutput]):
    """What one step gave its requests; an entry is made when it is looked at.

    Any thread may read it.
    """

    def __init__(
        self,
        requests: NDArray[np.object_],
        tokens: Tokens,
        counts: Ints,
        reasons: dict[int, FinishReason],
    ) -> None:
        """Take the requests [M], their tokens [M, K], how many count, and which ended why."""
        self.requests = requests
        self.tokens = tokens
        self.counts = counts
        self.reasons = reasons

    @classmethod
    def none(cls) -> StepOutputs:
        """Return what no step gave."""
        no_tokens = np.empty(0, np.int64)
        return cls(np.empty(0, object), np.empty((0, 1), np.int32), no_tokens, {})

    def __len__(self) -> int:
        """Return how many requests got a token."""
        return len(self.requests)

    @overload
    def __getitem__(self, index: int) -> StepOutput: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepOutput]: ...

    def __getitem__(self, index: int | slice) -> StepOutput | list[StepOutput]:
        """Return an entry, or a list of them."""
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        tokens = self.tokens[place, : self.counts[place]].tolist()
        return StepOutput(self.requests[place].request_id, tokens, self.reasons.get(place))

    def __iter__(self) -> Iterator[StepOutput]:
        """Return the entries one by one."""
        return map(self.__getitem__, range(len(self)))


class Verified(NamedTuple):
    """The tokens of a step that are kept: agreed drafts, and one that was chosen after them.

    Attributes:
        places: [M]; the requests that chose, as places in the batch.
        tokens: [M, K] int32; what each chose.
        kept: [M]; how many of those are kept.
    """

    places: Ints
    tokens: Tokens
    kept: Ints


class Scheduler:
    """Keeps the requests that wait and those that run.

    Attributes:
        requests: All of them, by name.
        waiting: Those without a row, the next one first.
        running: [N]; rows of those that have one, the oldest first.
        table: The numbers of those that run.
        kv: Their blocks.
        num_preemptions: Times that a request gave up its blocks for an older one.
    """

    def __init__(self, limits: ServingLimits, kv: KVCacheManager) -> None:
        """Start with no request."""
        self.table = RunningRequests(limits.max_num_reqs)
        self.kv = kv
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self._limits = limits
        self._empty()

    def _empty(self) -> None:
        self.waiting: deque[Request] = deque()
        self.running: Ints = np.empty(0, np.int64)
        self._free_rows = list(range(self._limits.max_num_reqs - 1, -1, -1))

    def schedule(self, last_step: int) -> SchedulerOutput:
        """Choose the batch of the next step and give it its blocks.

        Args:
            last_step: The last step launched; it and those before may still run. What it
                computes counts as computed.
        """
        table, kv = self.table, self.kv
        # 1. requests that run, oldest first, but for those whose last token is on its way
        known = table.num_tokens[self.running] + table.num_in_flight[self.running]
        is_due = known < table.max_len[self.running]
        due = self.running if is_due.all() else self.running[is_due]
        # 2. what each lacks and its drafts, up to the step's budget of tokens
        budget = self._limits.max_num_batched_tokens
        batch = self._cut(due, budget)
        # 3. blocks (KVCacheManager): all that a request needs, or none
        num_served, num_wanted, all_run = 0, len(batch.rows), True
        while num_served < num_wanted:
            part = slice(num_served, num_wanted)
            num_served += kv.allocate(batch.rows[part], batch.starts[part], batch.seq_lens[part])
            if num_served < num_wanted:
                if self._blocks_are_returning():
                    # the step that still uses them ends soon: wait, and let none overtake
                    num_wanted = num_served
                else:
                    # the one that came last starts over; it was not served yet
                    self._preempt(int(due[-1]), last_step)
                    due, all_run = due[:-1], False
                    num_wanted = min(num_wanted, len(due))
        batch = _first(batch, num_served)
        # 4. requests that wait, where all that run were served and there is room for more
        if all_run and num_served == len(due):
            admitted = self._admit(budget - int(batch.num_tokens.sum()), last_step)
            if admitted:
                batch = _concatenated([batch, *admitted])
        return _decodes_first(batch)

    def launched(self, batch: SchedulerOutput, step: int) -> None:
        """Count what a launched step is sure to compute as computed: it is in flight."""
        self.table.num_in_flight[batch.rows] += batch.num_choices > 0
        num_computed = batch.starts + batch.num_known
        self.table.num_computed[batch.rows] = num_computed
        self.kv.keep(batch.rows, num_computed, self.table, batch.is_prefilling)
        self.kv.advance(batch.rows, num_computed, last_step=step)

    def rows_to_draft(self) -> Ints:
        """Return the rows that decode next and have no drafts yet."""
        table, rows = self.table, self.running
        computed = table.num_computed[rows]
        decodes = (computed > 0) & (table.num_tokens[rows] - computed == 1)
        chosen: Ints = rows[decodes & (table.num_drafts[rows] == 0)]
        return chosen

    def update(self, batch: SchedulerOutput, verified: Verified, last_step: int) -> StepOutputs:
        """Take the tokens of a step, and end the requests that they end.

        Args:
            batch: The step's.
            verified: The tokens that are kept.
            last_step: The last step launched.
        """
        places, tokens, kept = verified
        if len(places) < len(batch.rows):
            batch = _picked(batch, places)
        is_live = self.table.lives[batch.rows] == batch.lives
        if is_live.all():
            return self._take(batch, tokens, kept, last_step)
        # of those that left their row, one that ended gets nothing, a preempted one its token
        late = self._give_late(batch.requests[~is_live], tokens[~is_live], kept[~is_live])
        batch = _picked(batch, is_live.nonzero()[0])
        return _joined(self._take(batch, tokens[is_live], kept[is_live], last_step), late)

    def verify(self, batch: SchedulerOutput, chosen: Tokens) -> Verified:
        """Return which of the tokens that a step chose are kept.

        Args:
            batch: The step's.
            chosen: Request by request as many as each has choices.
        """
        num_choices = batch.num_choices
        places = num_choices.nonzero()[0]
        counts = num_choices[places]
        widest = int(counts.max(initial=1))
        if widest == 1:
            return Verified(places, chosen[:, None], counts)
        ends = counts.cumsum()
        columns = np.minimum(np.arange(widest), counts[:, None] - 1)
        tokens = chosen[(ends - counts)[:, None] + columns]
        rows = batch.rows[places]
        first_draft = batch.starts[places] + batch.num_known[places]
        # the last column is beyond every draft: any token stands there, and none agrees
        drafts = np.full_like(tokens, -1)
        is_draft = np.arange(widest) < (counts - 1)[:, None]
        at = (first_draft[:, None] + np.arange(widest))[is_draft]
        drafts[is_draft] = self.table.read(np.repeat(rows, counts - 1), at)
        agreed = ((tokens == drafts) & is_draft).cumprod(axis=1).sum(axis=1)
        return Verified(places, tokens, agreed + 1)

    def require_fit(self, request: Request) -> None:
        """Refuse a request that could never finish.

        Raises:
            RequestRefusedError: It is too long, has nothing to do, or outgrows a pool.
        """
        if request.prompt_len < 1 or request.params.max_new_tokens < 1:
            raise RequestRefusedError(
                f"request {request.request_id!r} has {request.prompt_len} prompt tokens and wants "
                f"{request.params.max_new_tokens} new ones: both must be at least 1",
                prompt_len=request.prompt_len,
                max_new_tokens=request.params.max_new_tokens,
            )
        if request.max_len > self._limits.max_model_len:
            raise RequestRefusedError(
                f"request {request.request_id!r} has {request.prompt_len} prompt tokens and wants "
                f"{request.params.max_new_tokens} new ones, more than max_model_len "
                f"{self._limits.max_model_len}: shorten it or raise max_model_len",
                max_len=request.max_len,
                max_model_len=self._limits.max_model_len,
            )
        self.kv.require_room(request)

    def add(self, request: Request) -> None:
        """Let a request wait; it raises what ``require_fit`` does."""
        self.require_fit(request)
        # whatever fails in between, ``start_over`` knows it
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request: Request, last_step: int) -> None:
        """End a request early, wherever it is, and give its blocks back."""
        request.finish_reason = FinishReason.ABORTED
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._give_up_rows(np.array([request.row]), last_step)
        del self.requests[request.request_id]

    def start_over(self, last_step: int) -> None:
        """Let all requests wait again, in the order they came, with every row and block free.

        Only the requests and their tokens are trusted, and all else is made from them: so it
        mends what a step left half-done, whichever instruction it failed at, its own
        included. A request that its tokens end, or that was aborted, is taken out.
        """
        for request in self.requests.values():
            request.num_preemptions += request.row is not None
            if request.row is not None:
                request.leave_row()
            if request.prefix_hashes is not None:
                request.prefix_hashes.restart()
            request.finish_reason = request.finish_reason or request.reason_to_end()
        self.requests = {
            name: request
            for name, request in self.requests.items()
            if request.finish_reason is None
        }
        self._empty()
        self.waiting.extend(self.requests.values())
        self.table.reset()
        self.kv.reset(last_step=last_step)

    def _cut(self, rows: Ints, budget: int) -> SchedulerOutput:
        """Return the leading rows that a budget reaches, and what each computes."""
        table = self.table
        starts, num_tokens = table.num_computed[rows], table.num_tokens[rows]
        lacking = num_tokens + table.num_in_flight[rows] - starts
        is_prefilling = (starts == 0) | (lacking > 1)
        given = lacking
        if self._limits.num_speculative_tokens:
            # a step never computes past the end of its request
            room = table.max_len[rows] - starts - lacking
            drafts = np.where(is_prefilling, 0, np.minimum(table.num_drafts[rows], room))
            given = lacking + drafts
        count = len(rows)
        if given.sum() > budget:
            left = budget - (given.cumsum() - given)
            given = np.minimum(given, left)
            count = int((left > 0).sum())
        if is_prefilling.any():
            # a prompt's chunk ends where the state that it leaves can be found again
            given = np.where(is_prefilling, self.kv.chunk_ends(starts, given) - starts, given)
        num_known = np.minimum(lacking, given)[:count]
        num_drafts = given[:count] - num_known
        return SchedulerOutput(
            rows=rows[:count],
            lives=table.lives[rows[:count]],
            requests=table.requests[rows[:count]],
            starts=starts[:count],
            num_known=num_known,
            num_drafts=num_drafts,
            num_choices=(num_known == lacking[:count]) * (1 + num_drafts),
            is_prefilling=is_prefilling[:count],
            num_on_host=num_tokens[:count] + num_drafts,
        )

    def _admit(self, budget: int, last_step: int) -> list[SchedulerOutput]:
        """Give rows and blocks to requests that wait, while there are any; return their parts."""
        admitted: list[SchedulerOutput] = []
        while self.waiting and self._free_rows and budget > 0:
            request, row = self.waiting[0], self._free_rows[-1]
            num_computed = self.kv.start(row, request)
            self.table.enter(row, request, num_computed)
            part = self._cut(np.array([row]), budget)
            if not self.kv.allocate(part.rows, part.starts, part.seq_lens):
                self.table.leave(row)
                self.kv.release(part.rows, last_step=last_step)
                break
            self.kv.prefixes.count_hit(num_computed, is_again=request.num_preemptions > 0)
            self._free_rows.pop()
            self.waiting.popleft()
            self.running = np.append(self.running, row)
            admitted.append(part)
            budget -= int(part.num_tokens[0])
        return admitted

    def _take(
        self, batch: SchedulerOutput, tokens: Tokens, kept: Ints, last_step: int
    ) -> StepOutputs:
        """Give requests that still have their rows their tokens."""
        table, rows = self.table, batch.rows
        room = table.max_len[rows] - table.num_tokens[rows]
        kept = np.minimum(kept, room)
        stop = table.first_stop(rows, tokens)
        stops = stop < kept
        kept = np.minimum(kept, stop + 1)
        table.append(rows, tokens, kept)
        reasons: dict[int, FinishReason] = {}
        has_ended = stops | (kept == room)
        if has_ended.any():
            ended = has_ended.nonzero()[0]
            for place in ended.tolist():
                reason = FinishReason.STOP if stops[place] else FinishReason.LENGTH
                reasons[place] = batch.requests[place].finish_reason = reason
            self._give_up_rows(rows[ended], last_step)
            for place in ended.tolist():
                del self.requests[batch.requests[place].request_id]
        if self._limits.num_speculative_tokens:
            moved = ((batch.num_drafts > 0) & ~has_ended).nonzero()[0]
            rows, num_computed = rows[moved], (batch.starts + batch.num_known + kept - 1)[moved]
            table.num_computed[rows] = num_computed
            self.kv.keep(rows, num_computed, table, batch.is_prefilling[moved])
            self.kv.advance(rows, num_computed, last_step=last_step)
        return StepOutputs(batch.requests, tokens, kept, reasons)

    def _give_late(self, requests: NDArray[np.object_], tokens: Tokens, kept: Ints) -> StepOutputs:
        """Give preempted requests the tokens that were on their way."""
        owed = [place for place, each in enumerate(requests) if each.finish_reason is None]
        counts = np.zeros(len(owed), np.int64)
        reasons: dict[int, FinishReason] = {}
        for index, place in enumerate(owed):
            request: Request = requests[place]
            counts[index] = request.append(tokens[place, : kept[place]])
            reason = request.reason_to_end()
            if reason is not None:
                reasons[index] = request.finish_reason = reason
                self.waiting.remove(request)
                del self.requests[request.request_id]
        return StepOutputs(requests[owed], tokens[owed], counts, reasons)

    def _blocks_are_returning(self) -> bool:
        if self.kv.has_cooling_blocks:
            return True
        known = self.table.num_tokens[self.running] + self.table.num_in_flight[self.running]
        return bool((known >= self.table.max_len[self.running]).any())

    def _preempt(self, row: int, last_step: int) -> None:
        """Let a request wait again, with its tokens and without blocks.

        A step in flight may still write to them: they cool until ``last_step`` has ended. The
        token that it chooses for the request is added to it by ``_give_late``.
        """
        request: Request = self.table.requests[row]
        self._give_up_rows(np.array([row]), last_step)
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_up_rows(self, rows: Ints, last_step: int) -> None:
        table = self.table
        self.running = self.running[~np.isin(self.running, rows)]
        # what its last tokens filled; a chunk's blocks were findable when it was launched
        is_prefilling = np.zeros(len(rows), bool)
        self.kv.keep(rows, table.num_computed[rows], table, is_prefilling)
        self.kv.release(rows, last_step=last_step)
        for row in rows.tolist():
            self.table.leave(row)
            self._free_rows.append(row)


def _first(batch: SchedulerOutput, count: int) -> SchedulerOutput:
    return batch if count == len(batch.rows) else _picked(batch, slice(count))


def _decodes_first(batch: SchedulerOutput) -> SchedulerOutput:
    """Return a batch whose decodes stand before its prefills: builders split it there."""
    prefills = batch.is_prefilling
    if not (prefills[:-1] > prefills[1:]).any():
        return batch
    return _picked(batch, prefills.argsort(kind="stable"))


_ARRAYS = [
    "rows",
    "lives",
    "requests",
    "starts",
    "num_known",
    "num_drafts",
    "num_choices",
    "is_prefilling",
    "num_on_host",
]


def _picked(batch: SchedulerOutput, places: Ints | slice) -> SchedulerOutput:
    arrays = {name: getattr(batch, name)[places] for name in _ARRAYS}
    return SchedulerOutput(**arrays)


def _concatenated(batches: Sequence[SchedulerOutput]) -> SchedulerOutput:
    arrays = {name: np.concatenate([getattr(batch, name) for batch in batches]) for name in _ARRAYS}
    return SchedulerOutput(**arrays)


def _joined(first: StepOutputs, second: StepOutputs) -> StepOutputs:
    reasons = first.reasons | {place + len(first): why for place, why in second.reasons.items()}
    return StepOutputs(
        np.concatenate((first.requests, second.requests)),
        np.concatenate((first.tokens, second.tokens)),
        np.concatenate((first.counts, second.counts)),
        reasons,
    )
