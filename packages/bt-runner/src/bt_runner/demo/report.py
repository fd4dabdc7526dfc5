"""What the demo prints: the cache groups, the requests and a summary."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bt_runner.demo.check import Verdict
from bt_runner.engine import Engine
from bt_runner.request import Request


def groups_table(engine: Engine) -> Table:
    """Return one line per cache group."""
    table = Table(title="cache groups", title_justify="left")
    table.add_column("group")
    for heading in (
        "layers",
        "block size",
        "kernel block",
        "blocks per request",
        "width",
        "pool",
        "bytes",
    ):
        table.add_column(heading, justify="right")
    for group, layout, pool in zip(engine.groups, engine.layouts, engine.pools, strict=True):
        table.add_row(
            group.name,
            str(group.num_layers),
            str(layout.block_size),
            str(layout.kernel_block_size),
            str(layout.max_num_blocks),
            str(layout.width),
            str(pool.num_blocks),
            f"{engine.caches.num_bytes(group):,}",
        )
    return table


def requests_table(requests: Sequence[Request], names: Sequence[str]) -> Table:
    """Return one line per request."""
    table = Table(title="requests", title_justify="left")
    table.add_column("request")
    table.add_column("text")
    for heading in ("prompt", "new", "ended by"):
        table.add_column(heading, justify="right")
    for request, name in zip(requests, names, strict=True):
        reason = request.finish_reason.value if request.finish_reason else "-"
        table.add_row(
            request.request_id, name, str(request.prompt_len), str(len(request.output)), reason
        )
    return table


def print_summary(console: Console, engine: Engine, requests: Sequence[Request]) -> None:
    """Print what the run took."""
    prompt = sum(request.prompt_len for request in requests)
    new = sum(len(request.output) for request in requests)
    peaks = ", ".join(
        f"{group.name} {pool.peak_used} of {pool.capacity}"
        for group, pool in zip(engine.groups, engine.pools, strict=True)
    )
    preemptions = sum(request.num_preemptions for request in requests)
    console.print(
        f"requests {len(requests)}  tokens {prompt:,} read, {new:,} written  "
        f"steps {engine.num_steps}  preemptions {preemptions}",
        highlight=False,
    )
    console.print(f"blocks in use at the peak: {peaks}", highlight=False)


def print_check(console: Console, verdicts: Sequence[Verdict], bound: float) -> bool:
    """Print what the comparison found; return whether all requests match."""
    wrong = [verdict for verdict in verdicts if verdict.difference is not None]
    num_ties = sum(verdict.num_near_ties for verdict in verdicts)
    largest = max(verdict.max_logit_difference for verdict in verdicts)
    for verdict in wrong:
        console.print(f"MISMATCH {verdict.request_id}: {verdict.difference}", style="red")
    tokens = sum(verdict.num_tokens for verdict in verdicts)
    ties = f"; {num_ties} near ties (gap below {bound:g} of the range)" if num_ties else ""
    console.print(
        f"check: {len(verdicts) - len(wrong)} of {len(verdicts)} requests match the dense "
        f"reference, {tokens:,} tokens{ties}; largest difference of logits {largest:.1e}",
        style="red" if wrong else "green",
        highlight=False,
    )
    return not wrong
