"""``bt-runner replay``: real traffic over real geometry, checked, with its figures at the end."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence

from bt_builders import init_attention
from bt_runner.devices import find_device
from bt_runner.errors import BadInputError, VerificationError
from bt_runner.memory import memory_refused, require_memory, require_step_memory
from bt_runner.replay.counting import UpdateCounts, counting_executor
from bt_runner.replay.loop import Replay, ReplayOptions
from bt_runner.replay.model_groups import attention_group
from bt_runner.replay.pool_sizes import average_pool_sizes
from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import (
    MalformedLine,
    TraceRequest,
    read_trace,
    with_hash_tokens,
)
from bt_runner.terminal.progress import progress_bar
from bt_runner.terminal.threads import one_thread
from bt_tables import StagedBlockTables
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import BlockTableLayout
from bt_width.plan.options import groups_of, limits_of, longest_of, model_of

_MAX_COMPLAINTS = 10
_BYTES_PER_BLOCK = 128
"""Of a pool's books, at most."""


class _Complaints:
    """Names the first few lines that are left out, or ends the run at the first."""

    def __init__(self, is_strict: bool) -> None:
        self.count = 0
        self.first = ""
        self._is_strict = is_strict

    def add(self, line: int, reason: str) -> None:
        if self._is_strict:
            raise BadInputError(f"line {line}: {reason}", line=line)
        self.count += 1
        self.first = self.first or f"line {line}: {reason}"
        if self.count <= _MAX_COMPLAINTS:
            print(f"line {line} is left out: {reason}", file=sys.stderr)
        elif self.count == _MAX_COMPLAINTS + 1:
            print("further lines that are left out are not named", file=sys.stderr)


@memory_refused()
def run(args: argparse.Namespace) -> int:
    """Replay a trace and print the summary.

    Returns:
        0, or 1 where a table, a slot or a pool's book is not what it should be.

    Raises:
        BadInputError: The trace or the config cannot be used, or the pools are not the groups.
        BlockTableError: The options make no plan.
    """
    malformed, refused = _Complaints(args.strict), _Complaints(args.strict)
    requests = _read_requests(args, malformed)
    replay, counts = _prepare(args, requests)
    arrivals = Arrivals(requests, args.step_ms if args.arrivals == "trace" else None)
    try:
        with one_thread():
            _drive(replay, arrivals, len(requests), lambda line, why: refused.add(line.line, why))
    except (VerificationError, BlockTableFaultError) as error:
        print(f"step {replay.summary.num_steps}: {error}", file=sys.stderr)
        return 1
    summary = replay.summary
    if not summary.num_requests:
        raise BadInputError(
            f"none of the trace's {len(requests)} requests could run: {refused.first}",
            num_refused=summary.num_refused,
        )
    summary.num_malformed = malformed.count
    summary.num_launches = counts.num_launches
    summary.num_copies = counts.num_copies
    summary.num_bytes = counts.num_bytes
    print(json.dumps(summary.to_record(), indent=2) if args.json else summary.to_text())
    return 0


def _read_requests(args: argparse.Namespace, malformed: _Complaints) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    first_malformed = None
    for line in read_trace(args.trace, args.time_unit):
        if len(requests) == args.max_requests:
            break
        if isinstance(line, MalformedLine):
            first_malformed = first_malformed or line
            malformed.add(line.line, line.reason)
        else:
            requests.append(line)
    if not requests:
        raise BadInputError(
            f"no line of the trace {args.trace} is a request, of {malformed.count}; the first: "
            f"{first_malformed}",
            num_malformed=malformed.count,
        )
    return with_hash_tokens(requests, args.hash_tokens)


def _prepare(
    args: argparse.Namespace, requests: Sequence[TraceRequest]
) -> tuple[Replay, UpdateCounts]:
    model = model_of(args)
    groups = [attention_group(group, args.kernel_block_size) for group in groups_of(args, model)]
    limits = limits_of(args, longest_of(args, model))
    executor = counting_executor(find_device(args.device))
    require_step_memory(groups, limits, executor.device)
    setup = init_attention(groups, limits, executor.device)
    num_blocks = _pool_sizes(args, setup.layouts, requests)
    tables = StagedBlockTables(setup.layouts, device=executor, num_blocks=num_blocks)
    options = ReplayOptions(
        acceptance=args.acceptance,
        seed=args.seed,
        verify_every=args.verify_every,
        sanitizes=args.sanitize,
    )
    names = tuple(group.name for group in groups)
    return Replay(names, setup, tables, num_blocks, options), executor.counts


def _pool_sizes(
    args: argparse.Namespace, layouts: Sequence[BlockTableLayout], requests: Sequence[TraceRequest]
) -> tuple[int, ...]:
    blocks: list[int] | None = args.blocks
    if blocks is None:
        return average_pool_sizes(layouts, requests, args.acceptance)
    require_memory("the books of --blocks", max(blocks) * len(layouts) * _BYTES_PER_BLOCK, "cpu")
    if len(blocks) == 1:
        return (blocks[0],) * len(layouts)
    if len(blocks) != len(layouts):
        raise BadInputError(
            f"--blocks has {len(blocks)} numbers for {len(layouts)} cache groups; "
            "give one, or one for each",
            num_pools=len(blocks),
            num_groups=len(layouts),
        )
    return tuple(blocks)


def _drive(
    replay: Replay,
    arrivals: Arrivals,
    num_requests: int,
    on_refused: Callable[[TraceRequest, str], None],
) -> None:
    with progress_bar() as progress:
        task = progress.add_task("replaying", total=num_requests)
        for num_ended in replay.run(arrivals, on_refused):
            progress.update(task, completed=num_ended + replay.summary.num_refused)
