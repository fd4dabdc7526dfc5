"""What each decode token sees. N requests, T tokens."""

from __future__ import annotations

import torch

from bt_tables.triton_support import jit, tl

from ..batch.geometry import RowGeometry
from ..operations import TokenLens
from .launch import device_of, row_constants
from .tokens import local_states, request_of_token, token_len

_TILE = 128


def token_lens(
    geometry: RowGeometry,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    out: TokenLens,
) -> None:
    """Launch one program per tile of tokens; see ``Operations``."""
    num_reqs, num_tokens = seq_lens.numel(), out.seq_lens.numel()
    if not num_tokens:
        return
    with device_of(out.seq_lens):
        token_lens_kernel[(-(-num_tokens // _TILE),)](
            query_start_loc_ptr=query_start_loc,
            seq_lens_ptr=seq_lens,
            out_lens_ptr=out.seq_lens,
            out_local_lens_ptr=out.local_lens,
            N=num_reqs,
            T=num_tokens,
            search_steps=num_reqs.bit_length(),
            **row_constants(geometry),
            TILE=_TILE,
        )


@jit(
    any_value=(
        "query_start_loc_ptr",
        "seq_lens_ptr",
        "out_lens_ptr",
        "out_local_lens_ptr",
        "N",
        "T",
        "search_steps",
    )
)
def token_lens_kernel(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    out_lens_ptr: tl.tensor,  # [T] int32
    out_local_lens_ptr: tl.tensor,  # [T] int32
    N: tl.tensor,
    T: tl.tensor,
    search_steps: tl.tensor,
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Write the length of each token, on all ranks and on this one."""
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = tokens < T
    req = request_of_token(query_start_loc_ptr, tokens, N, search_steps)
    lens = token_len(query_start_loc_ptr, seq_lens_ptr, tokens, req, N)
    local = local_states(lens, TOKENS_PER_STATE, SHARDS, RANK, INTERLEAVE)
    tl.store(out_lens_ptr + tokens, lens, mask=inside)
    tl.store(out_local_lens_ptr + tokens, local, mask=inside)
