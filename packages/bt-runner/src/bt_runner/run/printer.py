"""Several texts that grow at once, shown one after another; it knows no requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class InOrder:
    """Writes the first unfinished text as it grows, and keeps the others back."""

    def __init__(self, heads: Sequence[str], write: Callable[[str], object]) -> None:
        """Take what stands above each text, and where to write."""
        self._heads = list(heads)
        self._waiting = [""] * len(heads)
        self._is_done = [False] * len(heads)
        self._write = write
        self._current = 0
        self._show(self._heads[0])

    def push(self, index: int, text: str) -> None:
        """Add to a text."""
        if index == self._current:
            self._show(text)
        else:
            self._waiting[index] += text

    def finish(self, index: int) -> None:
        """End a text; the next one that waits is shown as far as it is known."""
        self._is_done[index] = True
        while self._current < len(self._heads) and self._is_done[self._current]:
            self._show("\n")
            self._current += 1
            if self._current < len(self._heads):
                self._show(self._heads[self._current] + self._waiting[self._current])

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
