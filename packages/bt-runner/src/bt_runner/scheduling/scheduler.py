"""Which requests compute how many tokens in the next step; it knows no tensors.

First come, first served: requests that run go before those that wait, and where
blocks are short the one that came last gives up its own and starts over.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from bt_runner.errors import RequestRefusedError
from bt_runner.scheduling.request import Request
from bt_runner.scheduling.rows import NullPrefix, RequestRows
from bt_runner.scheduling.step_plan import Scheduled, StepPlan
from bt_width import ServingLimits


class Scheduler:
    """Keeps the requests that wait and those that run.

    Attributes:
        requests: All of them, by name.
        waiting: Those without a row, the next one first.
        running: Those with a row, the oldest first.
    """

    def __init__(self, limits: ServingLimits, rows: RequestRows) -> None:
        """Start with no request."""
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._limits = limits
        self._rows = rows
        self._free_rows = list(reversed(range(limits.max_num_reqs)))
        self._cleared_rows: list[int] = []
        self._null_prefixes: list[NullPrefix] = []

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
        self._rows.require_room(request)

    def add(self, request: Request) -> None:
        """Let a request wait; it raises what ``require_fit`` does."""
        self.require_fit(request)
        # whatever breaks off in between, nobody runs whom ``start_over`` does not know
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, last_step: int) -> StepPlan:
        """Plan the next step.

        Args:
            last_step: The last step launched; it and those before may still run. What it
                computes counts as computed where ``launch`` was told of it.
        """
        due = [request for request in self.running if not request.is_ending]
        plan: list[Scheduled] = []
        budget = self._limits.max_num_batched_tokens
        num_preempted = 0
        while len(plan) < len(due) and budget > 0:
            part = self._schedule_one(due[len(plan)], budget)
            if part is not None:
                if part.new_block_ids == part.request.block_ids:
                    # given whole: what stood there goes first
                    self._cleared_rows.append(part.row)
                plan.append(part)
                budget -= part.num_tokens
            elif self._blocks_are_returning:
                break
            else:
                # a row that is only now given up was not scheduled yet: it is the last
                self._preempt(due.pop(), last_step)
                num_preempted += 1
        if num_preempted == 0 and len(plan) == len(due):
            plan += self._admit(budget, last_step)
        plan.sort(key=lambda part: part.is_prefilling)
        step = StepPlan(
            null_prefixes=self._null_prefixes,
            cleared_rows=self._cleared_rows,
            scheduled=plan,
            num_preempted=num_preempted,
        )
        self._null_prefixes, self._cleared_rows = [], []
        return step

    def launch(self, part: Scheduled, step: int) -> None:
        """Count what a step is sure to compute for a request as computed: it is under way."""
        part.request.num_pending = min(part.num_choices, 1)
        self.advance(part.request, part.start + part.num_known, step)

    def advance(self, request: Request, num_computed: int, last_step: int) -> None:
        """Note how many tokens of a running request are computed, and free what none reads."""
        request.num_computed = num_computed
        self._null_prefixes += self._rows.trim(request, last_step=last_step)

    def finish(self, request: Request, last_step: int) -> None:
        """Take a request out, wherever it is, and give its blocks back."""
        if request.row is None:
            self.waiting.remove(request)
        else:
            self._give_up_row(request, last_step)
        del self.requests[request.request_id]

    def start_over(self, last_step: int) -> None:
        """Let all requests wait again, in the order they came, with every row and block free.

        Only ``requests`` and their tokens are taken for granted, and all else is made from
        them: so it mends what a step left half-done, between whichever two instructions it
        broke off. A request that its tokens end, or that was aborted, is taken out.
        """
        for request in self.requests.values():
            request.num_preemptions += request.row is not None
            request.start_over()
        self.requests = {
            name: request
            for name, request in self.requests.items()
            if request.finish_reason is None
        }
        self.waiting = deque(self.requests.values())
        self.running = []
        self._free_rows = list(reversed(range(self._limits.max_num_reqs)))
        self._null_prefixes = []
        self._cleared_rows = list(range(self._limits.max_num_reqs))
        self._rows.recount(last_step=last_step)

    @property
    def _blocks_are_returning(self) -> bool:
        return any(pool.num_cooling for pool in self._rows.pools) or any(
            request.is_ending for request in self.running
        )

    def _admit(self, budget: int, last_step: int) -> list[Scheduled]:
        admitted = []
        while self.waiting and self._free_rows and budget > 0:
            request = self.waiting[0]
            request.row = self._free_rows[-1]
            self._rows.start(request)
            part = self._schedule_one(request, budget)
            if part is None:
                self._rows.release(request, last_step=last_step)
                request.forget_cache()
                break
            self._free_rows.pop()
            self.running.append(self.waiting.popleft())
            # its row in the tables is empty: it gains what it began with, too
            block_ids = [list(ids) for ids in request.block_ids]
            admitted.append(replace(part, new_block_ids=block_ids))
            budget -= part.num_tokens
        return admitted

    def _schedule_one(self, request: Request, budget: int) -> Scheduled | None:
        start = request.num_computed
        num_known = min(request.num_to_compute, budget)
        room = min(budget, request.max_len - start) - num_known
        drafts = [] if request.is_prefilling else request.drafts[: max(room, 0)]
        seq_len = start + num_known + len(drafts)
        new_block_ids = self._rows.extend(request, seq_len)
        if new_block_ids is None or request.row is None:
            return None
        return Scheduled(
            request=request,
            row=request.row,
            start=start,
            num_known=num_known,
            drafts=drafts,
            num_choices=1 + len(drafts) if num_known == request.num_to_compute else 0,
            is_prefilling=request.is_prefilling,
            new_block_ids=new_block_ids,
        )

    def _preempt(self, request: Request, last_step: int) -> None:
        self._give_up_row(request, last_step)
        request.forget_cache()
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_up_row(self, request: Request, last_step: int) -> None:
        self._rows.release(request, last_step=last_step)
        if request.row is not None:
            self.running.remove(request)
            self._free_rows.append(request.row)
            self._cleared_rows.append(request.row)
            request.row = None
