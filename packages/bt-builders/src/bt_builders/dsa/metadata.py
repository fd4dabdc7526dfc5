"""What the DSA indexer's kernels are given for one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

DecodeForm: TypeAlias = Literal["plain", "native", "flattened"]
"""One token a row; several tokens a row, of one request; one row a token, copied."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSADecodeMetadata:
    """The decoding part of a batch; every tensor has the same number of rows (B).

    Lengths count what a token sees, itself included; padding rows hold 0 and a null row.

    Attributes:
        form: How rows stand for tokens.
        num_tokens: Decode tokens, padding included: ``B * M``.
        query_len: Tokens of a row (M); 1 unless ``form`` is "native".
        block_table: [B, W] int32; the group's own table unless ``form`` is "flattened".
        seq_lens: [B, M] int32; states on this rank.
        global_seq_lens: [B, M] int32; tokens on all ranks.
        max_seq_len: An upper bound of ``seq_lens``, equal on all ranks.
    """

    form: DecodeForm
    num_tokens: int
    query_len: int
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    global_seq_lens: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSAPrefillChunk:
    """Some prefilling requests, or some tokens of one, that are scored together.

    The keys of its requests stand one after the other in a workspace, states of this
    rank only. A request longer than the workspace stands alone and needs ``num_keys``.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests (P).
        first_token: The first token's place in the batch.
        num_tokens: Query tokens (Q).
        num_keys: An upper bound of the keys, equal on all ranks.
        gathers_keys: Whether the workspace must be filled; False where the chunk before
            held the same keys.
        block_table: [P, W] int32.
        cu_seq_lens: [P + 1] int32; where each request's keys begin in the workspace.
        token_to_req: [Q] int32; each token's request, counted from ``first_req``.
        cu_seqlen_ks: [Q] int32; the first key that a token sees, in the workspace.
        cu_seqlen_ke: [Q] int32; one past the last.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    num_keys: int
    gathers_keys: bool
    block_table: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DSAIndexerMetadata:
    """One step of the DSA indexer: decodes first, then chunks of prefills.

    Attributes:
        kernel_block_size: Tokens of a column.
        tokens_per_state: Tokens that share one stored key.
        slot_mapping: [T] int64; the slot of the key that a token completes.
        num_decodes: Requests that decode, padding included.
        num_prefills: Requests that prefill.
        decode: The decoding part; no rows where nothing decodes.
        prefill: The prefilling part.
    """

    kernel_block_size: int
    tokens_per_state: int
    slot_mapping: torch.Tensor
    num_decodes: int
    num_prefills: int
    decode: DSADecodeMetadata
    prefill: tuple[DSAPrefillChunk, ...]

    @property
    def states_per_kernel_block(self) -> int:
        """Stored keys of a column: the page size that the table's ids count in."""
        return self.kernel_block_size // self.tokens_per_state
