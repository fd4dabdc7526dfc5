"""What Mamba's kernels are given for one step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaStates:
    """Where the states of some requests (N) come from and go to; the pad stands for none.

    A kernel that reads one place and writes another takes ``source_ids`` and
    ``state_ids``. A kernel that works in place takes ``state_ids`` and
    ``num_accepted_tokens``, after a copy of ``source_ids`` to ``state_ids[:, 0]`` where
    ``copies`` says so.

    Attributes:
        source_ids: [N] int32; the state to start from; the pad for a new request.
        state_ids: [N, 1 + drafts] int32; where the state after each token goes. A
            request that prefills writes its last state to the first.
        num_accepted_tokens: [N] int32; one more than the column of ``state_ids`` that
            holds the state to start from.
        has_initial_states: [N] bool; whether there is a state to start from.
        copies: [N] bool; whether that state lies outside ``state_ids``.
    """

    source_ids: torch.Tensor
    state_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor
    has_initial_states: torch.Tensor
    copies: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaChunks:
    """How the prefilling tokens are cut for the scan; a chunk never crosses requests.

    A request's first chunk completes the chunk that its earlier tokens began.

    Attributes:
        cu_chunk_seqlens: [C + 1] int32; where each chunk begins among those tokens.
        last_chunk_indices: [P] int32; each request's last chunk, -1 where it has none.
        seq_idx: [C] int32; each chunk's request.
    """

    cu_chunk_seqlens: torch.Tensor
    last_chunk_indices: torch.Tensor
    seq_idx: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaDecodeMetadata:
    """The decoding part.

    Attributes:
        num_reqs: Requests (D), padding included.
        num_tokens: Tokens, padding included.
        max_query_len: The most tokens of one request.
        query_start_loc: [D + 1] int32.
        states: Where their states are.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    states: MambaStates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaPrefillMetadata:
    """The prefilling part.

    Attributes:
        first_req: The first request's row in the batch.
        num_reqs: Requests (P).
        first_token: The first token's place in the batch.
        num_tokens: Tokens.
        query_start_loc: [P + 1] int32; counted from ``first_token``.
        states: Where their states are.
        chunks: How their tokens are cut.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    query_start_loc: torch.Tensor
    states: MambaStates
    chunks: MambaChunks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MambaMetadata:
    """One step of Mamba: decodes first, then prefills; a part may be empty.

    Attributes:
        states: Where the states of the whole batch are.
        decode: The decoding part.
        prefill: The prefilling part.
    """

    states: MambaStates
    decode: MambaDecodeMetadata
    prefill: MambaPrefillMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SettledStates:
    """What to copy once it is known which of a step's tokens stay.

    In mode "align" a state that a later step looks for in an earlier column is copied
    there. The pad stands for "nothing to copy" in both ids.

    Attributes:
        source_ids: [N] int32.
        target_ids: [N] int32.
        num_accepted_tokens: [N] int32; what the next step's batch has to say.
    """

    source_ids: torch.Tensor
    target_ids: torch.Tensor
    num_accepted_tokens: torch.Tensor
