"""What the demo prints: the cache groups, the requests and a summary."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.demo.check import Verdict
from bt_runner.engine import Engine
from bt_runner.requests import Request
from bt_width.errors import counted
from bt_width.terminal import format_table


def groups_table(engine: Engine) -> str:
    """Return one line per cache group."""
    header = ("group", "layers", "block", "kernel block", "blocks", "width", "pool", "bytes")
    groups = zip(engine.groups, engine.layouts, engine.pools, engine.cache_bytes, strict=True)
    rows = []
    for group, layout, pool, num_bytes in groups:
        numbers = (
            group.num_layers,
            layout.block_size,
            layout.kernel_block_size,
            layout.max_num_blocks,
            layout.width,
            pool.num_blocks,
            num_bytes,
        )
        rows.append((group.name, *(f"{number:,}" for number in numbers)))
    return format_table(header, rows)


def requests_table(requests: Sequence[Request], names: Sequence[str]) -> str:
    """Return one line per request."""
    header = ("request", "text", "prompt", "new", "ended by")
    rows = []
    for request, name in zip(requests, names, strict=True):
        reason = request.finish_reason.value if request.finish_reason else "-"
        numbers = (f"{request.prompt_len:,}", str(len(request.output)), reason)
        rows.append((request.request_id, name, *numbers))
    return format_table(header, rows, num_texts=2)


def print_summary(
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
    print(
        f"requests {len(requests)}  tokens {prompt:,} read, {engine.prefixes.hit_tokens:,} of them "
        f"cached, {new:,} written  "
        f"steps {engine.num_steps} in {seconds:.1f} s  preemptions {preemptions}",
    )
    print(
        f"speed: {new / seconds:,.0f} tokens written per second; "
        f"host: {1000 * engine.host_seconds / engine.num_steps:.2f} ms per step"
        f"{', the model included' if on_host else ''}",
    )
    print(f"blocks in use at the peak: {peaks}")


def print_check(verdicts: Sequence[Verdict], bound: float) -> bool:
    """Print what the comparison found; return whether all requests match."""
    wrong = [verdict for verdict in verdicts if verdict.difference is not None]
    num_ties = sum(verdict.num_near_ties for verdict in verdicts)
    largest = max(verdict.max_logit_difference for verdict in verdicts)
    for verdict in wrong:
        print(f"MISMATCH {verdict.request_id}: {verdict.difference}")
    tokens = counted(sum(verdict.num_tokens for verdict in verdicts), "token", mark=",")
    ties = ""
    if num_ties:
        ties = f"; {counted(num_ties, 'near tie')} (gap below {bound:g} of the range)"
    print(
        f"check: {len(verdicts) - len(wrong)} of {len(verdicts)} requests match the dense "
        f"reference, {tokens}{ties}; largest difference of logits {largest:.1e}",
    )
    return not wrong
