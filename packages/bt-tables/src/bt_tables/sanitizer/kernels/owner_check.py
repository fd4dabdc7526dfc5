"""The blocks that a row holds, counted among those of all rows: who may hold one, and write to it.

B blocks of all pools.
"""

from __future__ import annotations

from ...triton_support import jit, tl
from .plan_line import CLAIMS_AT, NUM_BLOCKS, REFS, SPLIT

# a word of claims: the launch, the claims of writers, all claims
LAUNCH_SHIFT = tl.constexpr(40)
WRITERS_SHIFT = tl.constexpr(20)
CLAIMS_MASK = tl.constexpr((1 << 20) - 1)
MAX_LAUNCHES = 2**22
"""Launches after which a word runs out of numbers for them."""


@jit()
def claim_blocks(
    plan_ptr: tl.tensor,  # [NUM_FIELDS] int64
    claims_ptr: tl.tensor,  # [B] int64
    ids: tl.tensor,  # [tile] int64
    is_head: tl.tensor,  # [tile], where a live block of the row begins
    is_written: tl.tensor,  # [tile], where the step writes to that block
    launch: tl.tensor,  # int64
    HAS_REFS: tl.constexpr,
) -> tl.tensor:
    """Count the row among a block's holders; return where it must not be one.

    The last of a block's claims sees all others, so a conflict is seen in any order.
    """
    block = ids // tl.load(plan_ptr + SPLIT)
    is_claim = is_head & (block > 0) & (block < tl.load(plan_ptr + NUM_BLOCKS))
    block = tl.where(is_claim, block, 0)
    word = claims_ptr + tl.load(plan_ptr + CLAIMS_AT) + block
    fresh = (block * 0) + (launch << LAUNCH_SHIFT)
    tl.atomic_max(word, fresh, mask=is_claim)
    one = 1 + (is_written.to(tl.int64) << WRITERS_SHIFT)
    earlier = tl.atomic_add(word, one, mask=is_claim) - fresh
    claims = earlier & CLAIMS_MASK
    if HAS_REFS:
        refs = tl.load(plan_ptr + REFS).to(tl.pointer_type(tl.int32))
        holders = tl.load(refs + block, mask=is_claim, other=0)
        bad = (holders <= 0) | (claims >= holders) | (is_written & (holders > 1))
    else:
        bad = (claims > 0) & (is_written | (earlier >> WRITERS_SHIFT > 0))
    return is_claim & bad
