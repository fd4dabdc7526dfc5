"""What the demo prints: the cache groups, the requests and a summary."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bt_runner.demo.check import Verdict
from bt_runner.engine import Engine
from bt_runner.scheduling.request import Request


def groups_table(engine: Engine) -> Table:
    """Return one line per cache group."""
    table = _table(
        ("group",),
        ("layers", "block", "kernel block", "per request", "width", "pool", "bytes"),
    )
    rows = zip(engine.groups, engine.layouts, engine.pools, engine.cache_bytes, strict=True)
    for group, layout, pool, num_bytes in rows:
        numbers = (
            group.num_layers,
            layout.block_size,
            layout.kernel_block_size,
            layout.max_num_blocks,
            layout.width,
            pool.num_blocks,
            num_bytes,
        )
        table.add_row(group.name, *(f"{number:,}" for number in numbers))
    return table


def requests_table(requests: Sequence[Request], names: Sequence[str]) -> Table:
    """Return one line per request."""
    table = _table(("request", "text"), ("prompt", "new", "ended by"))
    for request, name in zip(requests, names, strict=True):
        reason = request.finish_reason.value if request.finish_reason else "-"
        numbers = (f"{request.prompt_len:,}", str(len(request.output)), reason)
        table.add_row(request.request_id, name, *numbers)
    return table


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_summary(
    console: Console,
    engine: Engine,
    requests: Sequence[Request],
    seconds: float,
    *,
    on_host: bool,
) -> None:
    """Print what the run took; ``on_host`` says that the host is the device, too."""
    prompt = sum(request.prompt_len for request in requests)
    new = sum(len(request.output) for request in requests)
    peaks = ", ".join(
        f"{group.name} {pool.peak_used} of {pool.capacity}"
        for group, pool in zip(engine.groups, engine.pools, strict=True)
    )
    preemptions = sum(request.num_preemptions for request in requests)
    console.print(
        f"requests {len(requests)}  tokens {prompt:,} read, {new:,} written  "
        f"steps {engine.num_steps} in {seconds:.1f} s  preemptions {preemptions}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(
        f"speed: {new / seconds:,.0f} tokens written per second; "
        f"host: {1000 * engine.host_seconds / engine.num_steps:.2f} ms per step"
        f"{', the model included' if on_host else ''}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"blocks in use at the peak: {peaks}", highlight=False, soft_wrap=True)


def print_check(console: Console, verdicts: Sequence[Verdict], bound: float) -> bool:
    """Print what the comparison found; return whether all requests match."""
    wrong = [verdict for verdict in verdicts if verdict.difference is not None]
    num_ties = sum(verdict.num_near_ties for verdict in verdicts)
    largest = max(verdict.max_logit_difference for verdict in verdicts)
    for verdict in wrong:
        console.print(
            f"MISMATCH {verdict.request_id}: {verdict.difference}", style="red", soft_wrap=True
        )
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    ties = f"; {num_ties} near ties (gap below {bound:g} of the range)" if num_ties else ""
    console.print(
        f"check: {len(verdicts) - len(wrong)} of {len(verdicts)} requests match the dense "
        f"reference, {tokens:,} tokens{ties}; largest difference of logits {largest:.1e}",
        style="red" if wrong else "green",
        highlight=False,
        soft_wrap=True,
    )
    return not wrong
