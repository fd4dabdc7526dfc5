"""The caches that tables point into: their shape, a view in kernel blocks, a plain writer.

A connector registers one shape, whichever table class runs: that of kernel blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bt_width import (
    PAD_SLOT,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    WidthMismatchError,
)


def kv_cache_shape(
    layout: BlockTableLayout,
    num_blocks: int,
    state_shape: Sequence[int],
    *,
    member: str | None = None,
) -> tuple[int, ...]:
    """Return the shape of a layer's cache, in kernel blocks.

    Args:
        layout: The plan of the layer's group.
        num_blocks: Blocks of the group's pool, block 0 included.
        state_shape: Shape of one stored state.
        member: The layer, where the group's layers differ in ``tokens_per_state``.

    Returns:
        ``(num_blocks * k, kernel_block_size // tokens_per_state, *state_shape)``, where a
        block is cut into k kernel blocks; ``(num_blocks, *state_shape)`` for recurrent
        state, of which a block holds one.

    Raises:
        InvalidSpecError: ``num_blocks`` or ``state_shape`` holds no counts, or there is no
            such member.
    """
    _require("layout", layout, BlockTableLayout)
    _require("state_shape", state_shape, Sequence)
    if any(type(size) is not int or size < 1 for size in state_shape):
        raise InvalidSpecError(
            f"state_shape must hold positive ints, not {state_shape!r}", state_shape=state_shape
        )
    if type(num_blocks) is not int or num_blocks < 1:
        raise InvalidSpecError(
            f"num_blocks must be an int of at least 1, not {num_blocks!r}", num_blocks=num_blocks
        )
    tokens_per_state = layout.tokens_per_state(member)
    if layout.kind == "mamba":
        return (num_blocks, *state_shape)
    kernel_blocks = num_blocks * layout.kernel_blocks_per_block
    return (kernel_blocks, layout.kernel_block_size // tokens_per_state, *state_shape)


def kernel_block_view(
    cache: torch.Tensor, layout: BlockTableLayout, *, member: str | None = None
) -> torch.Tensor:
    """Return a cache that was allocated in blocks as one of kernel blocks, sharing memory.

    Args:
        cache: ``[num_blocks, block_size // tokens_per_state, *state_shape]``, or
            ``[num_blocks, *state_shape]`` for recurrent state; a block's states must lie
            next to each other, blocks may have gaps between them where they are not cut.
        layout: The plan of the layer's group.
        member: The layer, where the group's layers differ in ``tokens_per_state``.

    Raises:
        WidthMismatchError: The cache has another shape, or strides that no view can cut.
        InvalidSpecError: The group has no member of this name.
    """
    _require("layout", layout, BlockTableLayout)
    _require("cache", cache, torch.Tensor)
    states = layout.block_size // layout.tokens_per_state(member)
    if layout.kind == "mamba":
        return cache
    if cache.dim() < 2 or cache.shape[1] != states:
        raise WidthMismatchError(
            f"the cache must hold {states} states a block in dimension 1, not {tuple(cache.shape)}",
            shape=tuple(cache.shape),
            states_per_block=states,
        )
    shape = kv_cache_shape(layout, cache.shape[0], cache.shape[2:], member=member)
    try:
        return cache.view(shape)
    except RuntimeError as error:
        raise WidthMismatchError(
            f"a cache of strides {cache.stride()} cannot be cut into kernel blocks without a "
            "copy; allocate its blocks without gaps",
            stride=cache.stride(),
        ) from error


def state_slots(
    slot_mapping: torch.Tensor, positions: torch.Tensor, tokens_per_state: int
) -> torch.Tensor:
    """Return the state slot that each token writes in a compressed group, or ``PAD_SLOT``.

    Tokens share a state; the last of them writes it.

    Args:
        slot_mapping: The group's slots, in tokens, [T] int64.
        positions: Place of each token in its request, [T] int64.
        tokens_per_state: Tokens that share a state.

    Raises:
        InvalidSpecError: ``tokens_per_state`` is not a positive int.
        WidthMismatchError: The slots and positions are not int64 vectors of one length.
    """
    _require("slot_mapping", slot_mapping, torch.Tensor)
    _require("positions", positions, torch.Tensor)
    if type(tokens_per_state) is not int or tokens_per_state < 1:
        raise InvalidSpecError(
            f"tokens_per_state must be a positive int, not {tokens_per_state!r}",
            tokens_per_state=tokens_per_state,
        )
    for tensor in (slot_mapping, positions):
        if tensor.dtype != torch.int64 or tensor.shape != (len(slot_mapping),):
            raise WidthMismatchError(
                f"slots and positions must be int64 vectors of one length, not {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}",
                dtype=str(tensor.dtype),
                shape=tuple(tensor.shape),
            )
    writes = (slot_mapping != PAD_SLOT) & ((positions + 1) % tokens_per_state == 0)
    return torch.where(writes, slot_mapping // tokens_per_state, PAD_SLOT)


def write_states(cache: torch.Tensor, slots: torch.Tensor, states: torch.Tensor) -> None:
    """Write each token's state to its slot; a token with ``PAD_SLOT`` writes nothing.

    The reference for what a kernel has to do: it does not wrap ``PAD_SLOT`` around to the
    cache's end, as an index of -1 would.

    Args:
        cache: ``[kernel blocks, states of one, *state_shape]``.
        slots: Where, [T] int64, counted in states over the whole cache.
        states: What, [T, *state_shape].

    Raises:
        WidthMismatchError: The shapes do not go together.
        InvalidEditError: A slot lies outside the cache.
        InvalidSpecError: An argument is not a tensor.
    """
    for name, tensor in (("cache", cache), ("slots", slots), ("states", states)):
        _require(name, tensor, torch.Tensor)
    if states.shape != (*slots.shape, *cache.shape[2:]) or slots.dim() != 1 or cache.dim() < 2:
        raise WidthMismatchError(
            f"states {tuple(states.shape)} do not fit slots {tuple(slots.shape)} and a cache "
            f"of {tuple(cache.shape)}",
            states_shape=tuple(states.shape),
            slots_shape=tuple(slots.shape),
            cache_shape=tuple(cache.shape),
        )
    written = slots[slots != PAD_SLOT]
    states_per_block = cache.shape[1]
    num_slots = cache.shape[0] * states_per_block
    if written.numel() and not 0 <= int(written.min()) <= int(written.max()) < num_slots:
        raise InvalidEditError(
            f"slots {int(written.min())}..{int(written.max())} leave the cache's 0.."
            f"{num_slots - 1}",
            num_slots=num_slots,
        )
    block = written // states_per_block
    cache[block, written % states_per_block] = states[slots != PAD_SLOT]


def _require(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidSpecError(
            f"{name} must be a {kind.__name__}, not {value!r} ({type(value).__name__})",
            argument=name,
        )
