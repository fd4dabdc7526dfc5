"""``bt-runner replay``: a trace of real traffic over a model's block tables, checked."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from bt_builders import init_attention
from bt_runner.devices import find_device
from bt_runner.errors import BadInputError, VerificationError
from bt_runner.memory import memory_refused, require_memory, require_step_memory
from bt_runner.prefix_cache import PrefixCache
from bt_runner.replay.counting import UpdateCounts, counting_executor
from bt_runner.replay.loop import Replay, ReplayOptions
from bt_runner.replay.model_groups import attention_group
from bt_runner.replay.pool_sizes import average_pool_sizes
from bt_runner.replay.traffic.arrivals import Arrivals
from bt_runner.replay.traffic.trace import (
    MalformedLine,
    TraceRequest,
    longest_common_beginning,
    read_trace,
    with_hash_tokens,
)
from bt_runner.report.page import require_report_library, write_report
from bt_runner.report.series import StepRecorder, StepTotals
from bt_runner.terminal.running import one_thread, progress_bar
from bt_tables import StagedBlockTables
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import BlockTableLayout
from bt_width.plan.options import groups_of, limits_of, longest_of, model_of, options_of_fields
from bt_width.terminal import ExitCode, name_options, print_error, print_line, print_warning

_MAX_COMPLAINTS = 10
_BYTES_PER_BLOCK = 128
"""Host memory of a pool, at most."""
_PHASES = ("table update", "builders", "the rest")


class _Complaints:
    """Names the first few lines that are left out, or ends the run at the first."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.count = 0
        self.first = ""
        self._is_strict = args.strict
        self._options = options_of_fields(args)

    def add(self, line: int, reason: str) -> None:
        if self._is_strict:
            raise BadInputError(f"line {line}: {reason}", line=line)
        self.count += 1
        self.first = self.first or f"line {line}: {reason}"
        if self.count <= _MAX_COMPLAINTS:
            told = name_options(reason, self._options)
            print(f"line {line} is left out: {told}", file=sys.stderr)
        elif self.count == _MAX_COMPLAINTS + 1:
            print("further lines that are left out are not named", file=sys.stderr)


@memory_refused()
def run(args: argparse.Namespace) -> int:
    """Replay a trace and print the summary.

    Returns:
        0, or 1 where a table, a slot or a pool's count is not what it should be.

    Raises:
        BadInputError: The trace or the config cannot be used, or the pools are not the groups.
        BlockTableError: The options make no plan.
    """
    malformed, refused = _Complaints(args), _Complaints(args)
    if args.report is not None:
        require_report_library()
    requests = _read_requests(args, malformed)
    replay, counts = _prepare(args, requests)
    _warn_of_no_hits(replay.kv.prefixes, requests)
    recorder = StepRecorder(replay.summary.groups, replay.summary.pool_blocks, _PHASES)
    steps = _Steps(replay, counts, recorder)
    is_whole = True
    arrivals = Arrivals(requests, args.step_ms if args.arrivals == "trace" else None)
    try:
        with one_thread():
            _drive(
                replay,
                arrivals,
                len(requests),
                lambda line, why: refused.add(line.line, why),
                steps.note,
            )
    except (VerificationError, BlockTableFaultError) as error:
        # the sanitizer's report begins with its step
        is_report = isinstance(error, BlockTableFaultError)
        print_error(str(error) if is_report else f"step {replay.summary.num_steps}: {error}")
        return ExitCode.MISMATCH
    except KeyboardInterrupt:
        is_whole = False
        print_line("interrupted: the figures so far")
    summary = replay.summary
    if is_whole and not summary.num_requests:
        raise BadInputError(
            f"no request of the trace could run, of {len(requests)}; the first: {refused.first}",
            num_refused=summary.num_refused,
        )
    summary.num_malformed = malformed.count
    summary.num_launches = counts.num_launches
    summary.num_copies = counts.num_copies
    summary.num_bytes = counts.num_bytes
    print(json.dumps(summary.to_record(), indent=2) if args.json else summary.to_text())
    if args.report is not None and summary.num_steps:
        title = f"bt-runner replay {args.trace.name}, {args.config}"
        write_report(args.report, title, summary.to_lines(), summary.to_record(), recorder.series())
    return ExitCode.OK if is_whole else ExitCode.INTERRUPTED


class _Steps:
    """Notes each step of a replay for its report."""

    def __init__(self, replay: Replay, counts: UpdateCounts, recorder: StepRecorder) -> None:
        self._replay, self._counts, self._recorder = replay, counts, recorder
        self._last = time.perf_counter()

    def note(self) -> None:
        """Note the step that has just ended."""
        now = time.perf_counter()
        summary = self._replay.summary
        tables, builders = summary.table_seconds[-1], summary.builder_seconds[-1]
        rest = max(now - self._last - tables - builders, 0.0)
        self._last = now
        self._recorder.note(
            StepTotals(
                used_blocks=summary.used_blocks[-1],
                running=self._replay.num_running,
                waiting=self._replay.num_waiting,
                preemptions=summary.num_preemptions,
                prompt_tokens=summary.prompt_tokens,
                hit_tokens=summary.hit_tokens,
                num_bytes=self._counts.num_bytes,
                phase_seconds=(tables, builders, rest),
            )
        )


def _warn_of_no_hits(prefixes: PrefixCache, requests: Sequence[TraceRequest]) -> None:
    """Say why no prompt token can be shared where the trace names tokens that could be."""
    common = longest_common_beginning(requests)
    if not common:
        return
    if prefixes.reason_for_none is not None:
        print_warning(f"no prompt token is shared: {prefixes.reason_for_none}")
    elif common < prefixes.unit:
        print_warning(
            f"no prompt token is shared: a shared beginning ends a block in every cache group, "
            f"which are {prefixes.unit:,} tokens over all ranks, and no two prompts have more than "
            f"their first {common:,} in common: make the blocks smaller"
        )


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
    replay = Replay(names, setup, tables, num_blocks, options)
    # what was launched to prepare the sizes of steps is not the trace's
    executor.counts.clear()
    return replay, executor.counts


def _pool_sizes(
    args: argparse.Namespace, layouts: Sequence[BlockTableLayout], requests: Sequence[TraceRequest]
) -> tuple[int, ...]:
    blocks: list[int] | None = args.blocks
    if blocks is None:
        return average_pool_sizes(layouts, requests, args.acceptance)
    require_memory(
        "the block pools of --blocks", max(blocks) * len(layouts) * _BYTES_PER_BLOCK, "cpu"
    )
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
    on_step: Callable[[], None],
) -> None:
    with progress_bar() as progress:
        task = progress.add_task("replaying", total=num_requests)
        for num_ended in replay.run(arrivals, on_refused):
            on_step()
            progress.update(task, completed=num_ended + replay.summary.num_refused)
