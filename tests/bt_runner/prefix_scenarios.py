"""Random conversations over a scheduler, its blocks, and a model whose states are names.

Instead of numbers, the caches hold which tokens a state was computed from. A step checks
that everything it reads was computed from its own request's tokens, and nothing else, so a
token chosen with prefix caching is the one chosen without it.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from bt_runner.kv_cache_manager import KVCacheManager
from bt_runner.requests import Request, SamplingParams
from bt_runner.scheduler import Scheduler, SchedulerOutput
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    ServingLimits,
    SlidingWindowSpec,
)

Name: TypeAlias = int
"""Names a list of tokens: what a state was computed from."""

_VOCAB = 3
_NO_TOKENS: Name = 17


@dataclass(frozen=True)
class Scenario:
    """One random scenario.

    Attributes:
        specs: The cache groups.
        room: Pools hold so many of the longest requests.
        num_drafts: Guesses that a decode verifies.
        max_steps_in_flight: Steps launched before their tokens are read.
        budget: Tokens of a step.
        prefix_caching: Whether requests share blocks.
        num_requests: Requests in all.
        seed: Of everything that is drawn.
    """

    specs: tuple[CacheSpec, ...]
    room: float
    num_drafts: int
    max_steps_in_flight: int
    budget: int
    prefix_caching: bool
    num_requests: int
    seed: int


@dataclass
class Result:
    """What came of a scenario.

    Attributes:
        outputs: The tokens of each request, by its name.
        hit_tokens: Tokens that were spared.
        rehit_tokens: Tokens that were spared after a preemption.
        num_preemptions: Requests that gave up their blocks.
    """

    outputs: dict[str, list[int]]
    hit_tokens: int
    rehit_tokens: int
    num_preemptions: int


def random_scenario(seed: int) -> Scenario:
    """Return a scenario with groups of any kinds, small pools and small blocks."""
    draw = random.Random(seed)
    num_drafts = draw.choice([0, 0, 1, 3])

    def size(smallest: int = 1) -> int:
        return draw.choice([size for size in (2, 4, 6, 8) if size >= smallest])

    def spec(kind: str) -> CacheSpec:
        match kind:
            case "full":
                return AttentionSpec(block_size=size())
            case "window":
                return SlidingWindowSpec(
                    block_size=size(),
                    window=draw.choice([1, 2, 5, 8, 17]),
                    extra_retained_tokens=num_drafts,
                )
            case _:
                return MambaSpec(
                    block_size=size(1 + num_drafts),
                    mode="align",
                    num_speculative_blocks=num_drafts,
                )

    names = draw.choice(
        [
            ["full"],
            ["states"],
            ["window"],
            ["full", "window"],
            ["full", "states"],
            ["states", "full", "window"],
        ]
    )
    return Scenario(
        specs=tuple(map(spec, names)),
        room=draw.choice([1.0, 1.2, 1.7, 4.0]),
        num_drafts=num_drafts,
        max_steps_in_flight=1 if num_drafts else draw.choice([1, 2]),
        budget=draw.choice([7, 16, 40]),
        prefix_caching=True,
        num_requests=24,
        seed=seed,
    )


def run(scenario: Scenario) -> Result:
    """Run a scenario to its end and check every step of it."""
    return _Run(scenario).run()


def _next(name: Name, token: int) -> Name:
    return (name * 6364136223846793005 + token + 1442695040888963407) % (2**61 - 1)


def _token_after(name: Name) -> int:
    return (name >> 20) % _VOCAB


class _Run:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.draw = random.Random(scenario.seed + 1)
        self.limits = ServingLimits(
            max_model_len=96,
            max_num_reqs=4,
            max_num_batched_tokens=scenario.budget,
            num_speculative_tokens=scenario.num_drafts,
        )
        self.layouts = [BlockTableLayout.plan(spec, self.limits) for spec in scenario.specs]
        self.kv = KVCacheManager(
            self.layouts,
            [
                2 + int(scenario.room * layout.max_resident_blocks(scenario.budget))
                for layout in self.layouts
            ],
            prefix_caching=scenario.prefix_caching,
        )
        self.scheduler = Scheduler(self.limits, self.kv)
        self.rows: list[list[list[int]]] = [
            [[] for _ in self.layouts] for _ in range(self.limits.max_num_reqs)
        ]
        # [group][block] -> what each of its tokens was computed from, or the one state
        self.memory: list[dict[tuple[int, int], Name]] = [{} for _ in self.layouts]
        self.in_flight: deque[tuple[int, SchedulerOutput, np.ndarray]] = deque()
        self.written: list[tuple[int, tuple[int, int]]] = []
        self.step = 0
        # the states that decodes go on from, as the builders keep them: right, wherever
        self.running_state: dict[str, Name] = {}
        self.outputs: dict[str, list[int]] = {}
        self.texts = [
            [self.draw.randrange(_VOCAB) for _ in range(self.draw.randint(1, 40))] for _ in range(3)
        ]

    def run(self) -> Result:
        todo = self.scenario.num_requests
        all_requests: list[Request] = []
        while todo or self.scheduler.requests:
            if todo and self.draw.random() < 0.4:
                request = self._new_request(todo)
                all_requests.append(request)
                self.scheduler.add(request)
                todo -= 1
            if self.scheduler.requests and self.draw.random() < 0.01:
                victim = self.draw.choice(list(self.scheduler.requests.values()))
                self.scheduler.abort(victim, self.step)
            if self.draw.random() < 0.01:
                # a step failed: only the requests and their tokens are trusted
                for group, key in self.written:
                    self.memory[group].pop(key, None)
                self.in_flight.clear()
                self.scheduler.start_over(self.step)
                self.kv.complete(self.step)
            self._step()
        while self.in_flight:
            self._finish_oldest()
        for pool in self.kv.pools:
            assert pool.num_used == 0
        for request in all_requests:
            self._check_output(request)
        return Result(
            outputs={request.request_id: request.output for request in all_requests},
            hit_tokens=self.kv.prefixes.hit_tokens,
            rehit_tokens=self.kv.prefixes.rehit_tokens,
            num_preemptions=sum(request.num_preemptions for request in all_requests),
        )

    def _new_request(self, number: int) -> Request:
        text = self.draw.choice(self.texts)
        prompt = text[: self.draw.randint(1, len(text))]
        prompt = prompt + [self.draw.randrange(_VOCAB) for _ in range(self.draw.randint(0, 5))]
        room = self.limits.max_model_len - len(prompt)
        params = SamplingParams(
            max_new_tokens=self.draw.randint(1, min(room, 30)),
            stop_tokens=frozenset(self.draw.choice([(), (), (2,)])),
        )
        return Request(f"request-{number}", np.array(prompt, np.int32), params)

    def _check_output(self, request: Request) -> None:
        """A token follows from the tokens before it, and from nothing else."""
        name = _NO_TOKENS
        for place, token in enumerate(request.tokens):
            if place >= request.prompt_len:
                assert token == _token_after(name)
            name = _next(name, token)
        if self.draw.random() < 0.3:
            # a second turn begins with the first one and its answer
            self.texts.append(request.tokens[:60])

    def _step(self) -> None:
        self._propose()
        launched = True
        while launched and len(self.in_flight) < self.scenario.max_steps_in_flight:
            launched = self._launch()
        if self.in_flight:
            self._finish_oldest()
        else:
            assert not self.scheduler.requests

    def _propose(self) -> None:
        count = self.scenario.num_drafts
        if not count:
            return
        rows = self.scheduler.rows_to_draft()
        if len(rows):
            drafts = np.zeros((len(rows), count), np.int32)
            for place, row in enumerate(rows.tolist()):
                name = self._names(self.scheduler.table.tokens_of(row).tolist())[-1]
                for column in range(count):
                    is_right = self.draw.random() < 0.7
                    token = _token_after(name) if is_right else self.draw.randrange(_VOCAB)
                    drafts[place, column] = token
                    name = _next(name, token)
            self.scheduler.table.set_drafts(rows, drafts, np.full(len(rows), count))

    def _launch(self) -> bool:
        batch = self.scheduler.schedule(last_step=self.step)
        if not len(batch.rows):
            return False
        self.step += 1
        self.written = []
        self._apply_edits()
        chosen: list[int] = []
        # all caches are written before any is read, as in a layer
        texts = [self._tokens_of(batch, place) for place in range(len(batch.rows))]
        names = [self._names(text) for text in texts]
        for place in range(len(batch.rows)):
            self._read_states(batch, place, names[place])
        for place in range(len(batch.rows)):
            self._write(batch, place, names[place])
        for place in range(len(batch.rows)):
            self._read(batch, place, names[place])
            last = int(batch.starts[place] + batch.num_known[place])
            for extra in range(int(batch.num_choices[place])):
                chosen.append(_token_after(names[place][last + extra]))
        self.scheduler.launched(batch, self.step)
        self.in_flight.append((self.step, batch, np.array(chosen, np.int32)))
        return True

    def _finish_oldest(self) -> None:
        step, batch, chosen = self.in_flight.popleft()
        verified = self.scheduler.verify(batch, chosen)
        num_kept = np.ones(len(batch.rows), np.int64)
        num_kept[verified.places] = verified.kept
        self._commit_drafts(batch, num_kept)
        self.scheduler.update(batch, verified, self.step)
        self.kv.complete(step)

    def _tokens_of(self, batch: SchedulerOutput, place: int) -> list[int]:
        """Return the tokens of a request that the device has in a step, drafts included."""
        row = int(batch.rows[place])
        known = self.scheduler.table.tokens_of(row).tolist()
        name = self._names(known)[-1]
        start, count = int(batch.starts[place]), int(batch.num_known[place])
        while len(known) < start + count:
            # chosen by a step in flight
            known.append(_token_after(name))
            name = _next(name, known[-1])
        places = np.arange(start + count, start + count + int(batch.num_drafts[place]))
        drafts = self.scheduler.table.read(np.full(len(places), row), places)
        return [*known[: start + count], *drafts.tolist()]

    def _names(self, tokens: list[int]) -> list[Name]:
        """Return the names of no token, the first, the first two ..."""
        names = [_NO_TOKENS]
        for token in tokens:
            names.append(_next(names[-1], token))
        return names

    def _apply_edits(self) -> None:
        edits = self.kv.take_edits()
        for row, group, count in edits.null_prefixes:
            held = self.rows[row][group]
            held[:count] = [NULL_BLOCK] * count
        for row in edits.cleared:
            self.rows[row] = [[] for _ in self.layouts]
        ids = iter(edits.block_ids.tolist())
        for row, counts in zip(edits.rows.tolist(), edits.counts.tolist(), strict=True):
            for group, count in enumerate(counts):
                self.rows[row][group] += [next(ids) for _ in range(count)]
        for row in self.scheduler.running.tolist():
            for group in range(len(self.layouts)):
                assert self.rows[row][group] == self.kv.block_ids_of(row, group)

    def _write(self, batch: SchedulerOutput, place: int, names: list[Name]) -> None:
        row, start = int(batch.rows[place]), int(batch.starts[place])
        for group, layout in enumerate(self.layouts):
            held = self.rows[row][group]
            if layout.kind == "mamba":
                first = layout.state_column(len(names) - 1)
                is_chunk = bool(batch.is_prefilling[place])
                states = names[-1:] if is_chunk else names[start + 1 :]
                for extra, name in enumerate(states):
                    self._put(group, held[first + extra], 0, name)
            else:
                for position in range(start, len(names) - 1):
                    column, offset = divmod(position, layout.block_size)
                    self._put(group, held[column], offset, names[position + 1])

    def _put(self, group: int, block_id: int, offset: int, name: Name) -> None:
        pool = self.kv.pools[group]
        assert block_id != NULL_BLOCK
        assert pool.references[block_id] == 1, "a shared block is written"
        if self.layouts[group].kind != "mamba" and block_id in pool._hash_of:
            assert self.memory[group].get((block_id, offset)) == name, "a findable block changes"
        self.memory[group][block_id, offset] = name
        self.written.append((group, (block_id, offset)))

    def _read(self, batch: SchedulerOutput, place: int, names: list[Name]) -> None:
        """Compare every token that a window or full attention reads."""
        row, start = int(batch.rows[place]), int(batch.starts[place])
        for group, layout in enumerate(self.layouts):
            spec, held = layout.spec, self.rows[row][group]
            if isinstance(spec, MambaSpec):
                continue
            first = max(start - spec.window + 1, 0) if isinstance(spec, SlidingWindowSpec) else 0
            for position in range(first, len(names) - 1):
                column, offset = divmod(position, layout.block_size)
                found = self.memory[group].get((held[column], offset))
                assert found == names[position + 1], "a token is read that is another's"

    def _read_states(self, batch: SchedulerOutput, place: int, names: list[Name]) -> None:
        """Compare the state that a step goes on from."""
        row, start = int(batch.rows[place]), int(batch.starts[place])
        request = batch.requests[place].request_id
        for group, layout in enumerate(self.layouts):
            if layout.kind == "mamba" and start:
                at = f"{request}/{group}/{start}"
                found = self.running_state.pop(at, None)
                if found is None:
                    block_id = self.rows[row][group][layout.state_column(start)]
                    found = self.memory[group].get((block_id, 0))
                assert found == names[start], "a state is read that is another's"

    def _commit_drafts(self, batch: SchedulerOutput, num_kept: np.ndarray) -> None:
        """Keep the states of accepted drafts, at every block's end too, as builders do."""
        for place in range(len(batch.rows)):
            drafts = int(batch.num_drafts[place])
            row, start = int(batch.rows[place]), int(batch.starts[place])
            if not drafts or self.scheduler.table.lives[row] != batch.lives[place]:
                continue
            names = self._names(self._tokens_of(batch, place))
            end = start + int(num_kept[place])
            for group, layout in enumerate(self.layouts):
                if layout.kind != "mamba":
                    continue
                held = self.rows[row][group]
                for boundary in range(start + 1, end + 1):
                    if boundary % layout.block_size == 0:
                        block_id = held[boundary // layout.block_size - 1]
                        self._put(group, block_id, 0, names[boundary])
                at = f"{batch.requests[place].request_id}/{group}/{end}"
                self.running_state[at] = names[end]
