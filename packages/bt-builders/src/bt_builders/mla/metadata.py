"""What MLA's kernels are given for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLADecodeMetadata:
    """The decoding part: requests (D) that attend to the cache through their rows.

    Attributes:
        num_tokens: Tokens (Q), padding included.
        max_query_len: The most tokens of one request.
        is_uniform: Whether every row has that many.
        query_start_loc: [D + 1] int32.
        block_table: [D, W] int32.
        seq_lens: [D] int32; tokens on this rank.
        token_seq_lens: [Q] int32; what each token sees on this rank, itself included.
        max_seq_len: An upper bound of both, equal on all ranks.
    """

    num_tokens: int
    max_query_len: int
    is_uniform: bool
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    token_seq_lens: torch.Tensor
    max_seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAContextChunk:
    """Part of the prefilling requests' (P) contexts, gathered into a workspace at once.

    A request's span begins at a whole kernel block on every rank. Requests without a
    span in this chunk have an empty one.

    Under context parallelism every rank gathers its own rows, ``num_local_rows`` of
    them with gaps, and ``gathered_rows`` finds a token in the ranks' rows one after the
    other. Without it local and global numbers are the same.

    Attributes:
        num_tokens: Tokens of all spans (K), at most.
        max_seq_len: The longest span.
        starts: [P] int32; where each span begins in its request.
        cu_seq_lens: [P + 1] int32; where each span begins among the chunk's tokens.
        token_to_req: [K] int32; each token's request; P past the last one.
        local_starts: [P] int32; where each span begins among this rank's tokens.
        local_seq_lens: [P] int32; tokens of each span on this rank.
        local_cu_seq_lens: [P + 1] int32; where each span begins among the local rows,
            equal on all ranks.
        num_local_rows: Rows that each rank gathers, equal on all ranks.
        gathered_rows: [K] int64; each token's row in [shards * num_local_rows]; 0 past the
            last one.
    """

    num_tokens: int
    max_seq_len: int
    starts: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_req: torch.Tensor
    local_starts: torch.Tensor
    local_seq_lens: torch.Tensor
    local_cu_seq_lens: torch.Tensor
    num_local_rows: int
    gathered_rows: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAPrefillMetadata:
    """The prefilling part: requests (P) whose new tokens attend to each other and a context.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests.
        first_token: The first token's place in the batch.
        num_tokens: New tokens.
        max_query_len: The most new tokens of one request.
        query_start_loc: [P + 1] int32; counted from ``first_token``.
        block_table: [P, W] int32.
        context_lens: [P] int32; tokens of each request before this step.
        context_chunks: The contexts in pieces; none where no request has one.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    context_chunks: tuple[MLAContextChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAMetadata:
    """One step of MLA: decodes first, then prefills; a part may be empty.

    Attributes:
        kernel_block_size: Tokens of a column.
        slot_mapping: [T] int64.
        num_decodes: Requests that decode, padding included.
        num_prefills: Requests that prefill.
        decode: The decoding part.
        prefill: The prefilling part.
    """

    kernel_block_size: int
    slot_mapping: torch.Tensor
    num_decodes: int
    num_prefills: int
    decode: MLADecodeMetadata
    prefill: MLAPrefillMetadata
