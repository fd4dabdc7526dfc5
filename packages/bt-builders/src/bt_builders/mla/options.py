"""What an MLA backend's kernels take in a decode, and the workspace its prefills may use."""

from __future__ import annotations

from dataclasses import dataclass

from bt_width import InvalidSpecError

from ..arguments import require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAOptions:
    """The choices of one MLA backend.

    Attributes:
        max_decode_query_len: The most tokens of a request that decodes, or None for one
            and the drafts that the limits allow.
        uniform_decodes: Whether the kernel needs equal query lengths; rows after the
            first that differs then prefill.
        workspace_tokens: Tokens of context that a prefill gathers at once.
    """

    max_decode_query_len: int | None = None
    uniform_decodes: bool = False
    workspace_tokens: int = 65_536

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing."""
        require_positive("workspace_tokens", self.workspace_tokens)
        if self.max_decode_query_len is not None:
            require_positive("max_decode_query_len", self.max_decode_query_len)
        if not isinstance(self.uniform_decodes, bool):
            raise InvalidSpecError(
                f"uniform_decodes must be a bool, not {self.uniform_decodes!r}",
                value=self.uniform_decodes,
            )
