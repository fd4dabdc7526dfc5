"""What a Mamba backend's kernels want; nothing here says how states lie in a row."""

from __future__ import annotations

from dataclasses import dataclass

from bt_width import NULL_BLOCK, InvalidSpecError

from ..arguments import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaOptions:
    """The choices of one Mamba backend.

    Attributes:
        chunk_size: Tokens of a chunk of the prefill scan.
        state_pad: The state id that means "none" to the kernels: ``NULL_BLOCK``, which
            is a real state that nothing reads, or -1.
    """

    chunk_size: int = 256
    state_pad: int = NULL_BLOCK

    def __post_init__(self) -> None:
        """Refuse a chunk that holds nothing and a pad that names a state."""
        require_positive("chunk_size", self.chunk_size)
        if type(self.state_pad) is not int or self.state_pad not in (NULL_BLOCK, -1):
            raise InvalidSpecError(
                f"state_pad must be {NULL_BLOCK} or -1, not {self.state_pad!r}: any other id is "
                "some request's state",
                value=self.state_pad,
            )
