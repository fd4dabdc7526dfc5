"""What guesses tokens ahead; a wrong guess costs time and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bt_runner.arguments import require_int


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return at most ``max_drafts`` tokens that may follow ``tokens``."""


class NGramDrafter:
    """Looks up in the text itself what followed its last tokens before.

    Any thread may use it: it keeps nothing of a text.

    Attributes:
        longest: The most tokens that are looked up together; fewer are tried after them.
        reach: How far back is looked, in tokens.
    """

    def __init__(self, longest: int = 3, reach: int = 4_096) -> None:
        """Take how much is looked up, and how far back.

        Raises:
            BadInputError: One of them is not an int above 0.
        """
        require_int("longest", longest, minimum=1)
        require_int("reach", reach, minimum=1)
        self.longest = longest
        self.reach = reach

    def propose(self, tokens: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Return what followed the latest earlier place where the longest match stands."""
        text = list(tokens[-self.reach :])
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            pattern = text[-size:]
            for start in range(len(text) - size - 1, -1, -1):
                if text[start : start + size] == pattern:
                    return text[start + size : start + size + max_drafts]
        return []
