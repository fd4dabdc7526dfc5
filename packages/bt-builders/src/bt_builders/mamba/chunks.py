"""How prefilling tokens are cut into chunks of the scan, for all requests at once."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

_Ints: TypeAlias = NDArray[np.int32]


class ChunkCut(NamedTuple):
    """Chunks in host numbers; see ``MambaChunks``."""

    cu_chunk_seqlens: _Ints
    last_chunk_indices: _Ints
    seq_idx: _Ints


def cut_chunks(query_lens: _Ints, num_computed_tokens: _Ints, chunk_size: int) -> ChunkCut:
    """Cut each request's tokens at multiples of ``chunk_size`` of its own positions.

    Args:
        query_lens: [P]; tokens of each request in this step.
        num_computed_tokens: [P]; tokens of each request before it.
        chunk_size: Tokens of a full chunk.
    """
    begun = num_computed_tokens % chunk_size
    # chunks of positions 0..begun + query_len - 1; those before `begun` are all in the first
    num_chunks = (-(-(begun + query_lens) // chunk_size)).astype(np.int32)
    num_chunks[query_lens == 0] = 0
    ends = num_chunks.cumsum(dtype=np.int32)
    req_of_chunk = np.arange(query_lens.size, dtype=np.int32).repeat(num_chunks)
    ordinal = np.arange(req_of_chunk.size, dtype=np.int32) - (ends - num_chunks)[req_of_chunk]
    token_ends = query_lens.cumsum(dtype=np.int32)
    first_tokens = (token_ends - query_lens)[req_of_chunk]
    starts = first_tokens + np.maximum(ordinal * chunk_size - begun[req_of_chunk], 0)
    total = token_ends[-1:] if token_ends.size else np.zeros(1, dtype=np.int32)
    return ChunkCut(
        np.concatenate([starts, total]).astype(np.int32, copy=False),
        np.where(num_chunks > 0, ends - 1, -1).astype(np.int32, copy=False),
        req_of_chunk,
    )
