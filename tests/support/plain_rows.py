"""One row of one cache group, a column at a time: which columns hold a block."""

from __future__ import annotations

from bt_width import BlockTableLayout


class PlainRow:
    """Says which columns of a row hold a block, by the layout's own numbers.

    Attributes:
        is_held: Of each column.
    """

    def __init__(self, layout: BlockTableLayout) -> None:
        self.is_held: list[bool] = []
        self._layout = layout

    def extend(self, num_computed: int, seq_len: int) -> None:
        """Add the columns of a step."""
        end = self._layout.num_blocks(seq_len)
        if end <= len(self.is_held):
            return
        if self._layout.kind == "mamba":
            read = self._layout.state_column(num_computed)
            written = self._layout.state_column(seq_len)
            missing = end - max(written, len(self.is_held))
            self.is_held += [False] * max(written - len(self.is_held), 0)
            # a state of a draft that is no longer wanted becomes one that is missing
            for column in range(read + 1, min(written, len(self.is_held))):
                if self.is_held[column] and missing:
                    self.is_held[column] = False
                    self.is_held.append(True)
                    missing -= 1
        self.is_held += [True] * (end - len(self.is_held))

    def trim(self, num_computed: int) -> None:
        """Take the columns that no later step reads."""
        num_dead = min(self._layout.num_expired_blocks(num_computed), len(self.is_held))
        self.is_held[:num_dead] = [False] * num_dead
