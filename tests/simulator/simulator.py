"""Lets random requests come and go through an engine's loop, and sees that nothing is lost."""

from __future__ import annotations

import math
import random
import time

from tests.simulator.counts import Counts
from tests.simulator.ranks_runner import BrokenStepError, RanksRunner
from tests.simulator.traffic import Traffic

from bt_runner.engine import EngineLoop
from bt_runner.errors import VerificationError
from bt_runner.scheduler import StepOutputs

MAX_WAITING = 3
DISTURBED = 0.06


class Simulator:
    """Serves random requests, and checks every token that they are given.

    Attributes:
        loop: The engine's loop, or an engine.
    """

    def __init__(
        self, loop: EngineLoop, traffic: Traffic, draw: random.Random, counts: Counts
    ) -> None:
        """Start with no request.

        Args:
            loop: What serves them.
            traffic: Which requests come.
            draw: Decides everything else that is left to chance.
            counts: What is counted, shared with other simulators.
        """
        self.loop = loop
        self._runner = loop._runner
        self._scheduler = loop._scheduler
        self._traffic = traffic
        self._draw = draw
        self._counts = counts

    def run(self, num_steps: int, until: float = math.inf) -> None:
        """Let requests come and go for some steps, or until ``time.monotonic()`` is ``until``.

        Raises:
            BlockTableError: The tables or the builders refused a step.
            BlockTableFaultError: The sanitizer found something.
            VerificationError: A step, or what it gave a request, is not what it must be.
            RunnerError: Requests wait, and none can be computed.
        """
        for _ in range(num_steps):
            if time.monotonic() >= until:
                break
            self._let_come()
            self._disturb()
            self._step()

    def serve(self, num_requests: int) -> None:
        """Let so many requests come, and serve all; it raises what ``run`` and ``drain`` do."""
        last = self._traffic.num_requests + num_requests
        while self._traffic.num_requests < last:
            self._let_come(last)
            self._disturb()
            self._step()
        self.drain()

    def drain(self, until: float = math.inf) -> None:
        """Serve those that are left, and see that every block came back.

        What is left when ``time.monotonic()`` is ``until`` is aborted.

        Raises:
            BlockTableError: As for ``run``.
            BlockTableFaultError: As for ``run``.
            VerificationError: As for ``run``, or a pool lacks a block.
            RunnerError: As for ``run``.
        """
        while self.loop.has_work:
            if time.monotonic() >= until:
                for name in list(self._traffic.live):
                    self._abort(name)
            self._step()
        if self._traffic.live:
            raise VerificationError(f"requests {list(self._traffic.live)} never ended")
        for group, pool in enumerate(self.loop.pools):
            num_lost = pool.capacity - pool.num_free
            if num_lost:
                self._counts.num_lost_blocks += num_lost
                raise VerificationError(
                    f"group {group}: {num_lost} of {pool.capacity} blocks did not come back",
                    group=group,
                    expected=pool.capacity,
                    found=pool.num_free,
                )

    def _let_come(self, last: float = math.inf) -> None:
        traffic = self._traffic
        while (
            traffic.num_requests < last
            and len(self._scheduler.waiting) < MAX_WAITING
            and self._draw.random() < 0.5
        ):
            self.loop.add(traffic.next().request)

    def _disturb(self) -> None:
        """Do now and then what an engine does between two steps."""
        if self._draw.random() >= DISTURBED:
            return
        match self._draw.choice(["abort", "abort", "invalidate", "remap", "dummy", "dummy"]):
            case "abort" if self._traffic.live:
                self._abort(self._draw.choice(list(self._traffic.live)))
            case "invalidate":
                self._runner.invalidate()
            case "remap" if isinstance(self._runner, RanksRunner):
                self._runner.remap()
            case "dummy" if isinstance(self._runner, RanksRunner):
                limits = self.loop.layouts[0].limits
                query_len = self._draw.choice([1, 1 + limits.num_speculative_tokens])
                most = min(limits.max_num_reqs, limits.max_num_batched_tokens // query_len)
                self._runner.dummy_step(self._draw.randint(1, most), query_len)
                self._counts.num_dummy_steps += 1
            case _:
                pass

    def _abort(self, name: str) -> None:
        expected = self._traffic.live[name]
        self.loop.abort(name)
        expected.abort()
        self._traffic.end(name)
        self._counts.num_aborted += 1

    def _step(self) -> None:
        prefixes, counts = self.loop.prefixes, self._counts
        counts.num_preemptions -= self._scheduler.num_preemptions
        counts.num_hit_tokens -= prefixes.hit_tokens
        counts.num_rehit_tokens -= prefixes.rehit_tokens
        try:
            outputs = self.loop.step()
        except BrokenStepError:
            counts.num_broken_steps += 1
            outputs = StepOutputs.none()
        counts.num_preemptions += self._scheduler.num_preemptions
        counts.num_hit_tokens += prefixes.hit_tokens
        counts.num_rehit_tokens += prefixes.rehit_tokens
        for output in outputs:
            self._traffic.live[output.request_id].give(output)
            if output.finish_reason is not None:
                self._traffic.end(output.request_id)
                counts.num_ended += 1
