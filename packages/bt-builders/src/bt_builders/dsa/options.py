"""What a DSA indexer's kernels can do and may use; nothing here follows from a length limit."""

from __future__ import annotations

from dataclasses import dataclass

from bt_width import InvalidSpecError

from ..arguments import as_tuple, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DSAOptions:
    """The choices of one indexer backend.

    Attributes:
        native_query_lens: Tokens of a request that the decode kernel takes in one row;
            other batches are flattened to one row a token.
        workspace_tokens: Tokens whose keys a prefill chunk of several requests gathers.
        max_logits_bytes: Bytes of float32 scores that a prefill chunk may need.
        member: The layer of a ``UniformSpec`` whose ``tokens_per_state`` counts, where
            its members differ.
    """

    native_query_lens: frozenset[int] = frozenset({1, 2})
    workspace_tokens: int = 65_536
    max_logits_bytes: int = 512 * 2**20
    member: str | None = None

    def __post_init__(self) -> None:
        """Refuse sizes that hold nothing and query lengths that are none."""
        require_positive("workspace_tokens", self.workspace_tokens)
        require_positive("max_logits_bytes", self.max_logits_bytes)
        for query_len in as_tuple("native_query_lens", self.native_query_lens):
            require_positive("a native query length", query_len)
        object.__setattr__(self, "native_query_lens", frozenset(self.native_query_lens))
        if not isinstance(self.member, str | None):
            raise InvalidSpecError(
                f"member must be a name or None, not {self.member!r}", value=self.member
            )
