"""What kernels share of tokens: whose one is, what of a length is local, which state it completes.

Everything divided here is at least 0, so that a division that truncates also floors.
"""

from __future__ import annotations

from bt_tables.triton_support import jit, tl


@jit()
def request_of_token(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    tokens: tl.tensor,  # a scalar or a tile, int32
    N: tl.tensor,
    search_steps: tl.tensor,
) -> tl.tensor:
    """Return the request that each token belongs to; N past the last one's tokens."""
    low = tokens * 0
    high = low + N
    # a `while`, because some interpreters refuse a `range` over a loaded value
    while search_steps > 0:
        middle = (low + high) // 2
        is_open = low < high
        end = tl.load(query_start_loc_ptr + 1 + middle, mask=is_open, other=0)
        ends_before = end <= tokens
        low = tl.where(is_open & ends_before, middle + 1, low)
        high = tl.where(is_open & (end > tokens), middle, high)
        search_steps -= 1
    return low


@jit()
def token_len(
    query_start_loc_ptr: tl.tensor,  # [N + 1] int32
    seq_lens_ptr: tl.tensor,  # [N] int32
    tokens: tl.tensor,  # a scalar or a tile, int32
    req: tl.tensor,  # like tokens
    N: tl.tensor,
) -> tl.tensor:
    """Return what each token sees, itself included; 0 past the last request's tokens."""
    is_real = req < N
    end = tl.load(query_start_loc_ptr + req + 1, mask=is_real, other=0)
    seq_len = tl.load(seq_lens_ptr + req, mask=is_real, other=0)
    return tl.where(is_real, tl.maximum(seq_len - end + tokens + 1, 0), 0)


@jit()
def local_states(
    lens: tl.tensor,  # any shape, int32
    TOKENS_PER_STATE: tl.constexpr,
    SHARDS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
) -> tl.tensor:
    """Return the states of ``lens`` tokens that this rank keeps."""
    turns = lens // (SHARDS * INTERLEAVE)
    rest = lens - turns * (SHARDS * INTERLEAVE) - RANK * INTERLEAVE
    own = tl.minimum(tl.maximum(rest, 0), INTERLEAVE)
    return (turns * INTERLEAVE + own) // TOKENS_PER_STATE


@jit()
def state_slot(
    positions: tl.tensor,  # any shape, int64
    slots: tl.tensor,  # like positions
    TOKENS_PER_STATE: tl.constexpr,
    PAD_SLOT: tl.constexpr,
) -> tl.tensor:
    """Return the slot of the state that each token completes, else ``PAD_SLOT``."""
    completes = (slots >= 0) & (positions >= 0)
    completes = completes & ((tl.maximum(positions, 0) + 1) % TOKENS_PER_STATE == 0)
    return tl.where(completes, tl.maximum(slots, 0) // TOKENS_PER_STATE, PAD_SLOT)
