"""What stands around a run: a bar that grows, torch kept to one thread, and what is not shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bt_runner.prefix_cache import PrefixCache
from bt_width.terminal import print_line


def progress_bar() -> Progress:
    """Return a bar on standard error, to be entered; in a pipe it shows nothing."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread inside, for tensors so small that more would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tell_why_nothing_is_shared(prefixes: PrefixCache) -> None:
    """Print a line where no prefix can be cached, whatever the requests are."""
    if prefixes.reason_for_none is not None:
        print_line(f"no prefix is cached: {prefixes.reason_for_none}")
