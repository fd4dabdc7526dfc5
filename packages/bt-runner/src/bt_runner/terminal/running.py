"""What stands around a run: a bar that grows, and torch kept to one thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


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
