"""The memory behind the tables: one tensor per layer and kind of state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_runner.memory import require_memory
from bt_runner.models.cache.cache_groups import CachedTensor, CacheGroup, cache_dtype
from bt_runner.models.cache.paging import write
from bt_tables import kv_cache_shape
from bt_width import BlockTableLayout, UniformSpec


class Caches:
    """All cache tensors of a model; a block id names the same block in each of a group.

    Attributes:
        tensors: By layer and name.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        layouts: Sequence[BlockTableLayout],
        num_blocks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate every group's tensors for its pool.

        Raises:
            BadInputError: Memory is too small for it.
        """
        self._groups = tuple(groups)
        self.tensors: dict[tuple[int, str], Tensor] = {}
        num_bytes = sum(
            math.prod(kv_cache_shape(layout, count, tensor.shape, member=_member(layout, tensor)))
            * cache_dtype(tensor, dtype).itemsize
            for group, layout, count in zip(groups, layouts, num_blocks, strict=True)
            for tensor in group.tensors
        )
        require_memory(
            f"caches of {max(num_blocks, default=0):,} blocks",
            num_bytes,
            device,
            advice="make num_blocks, max_num_reqs or max_model_len smaller",
        )
        for group, layout, count in zip(groups, layouts, num_blocks, strict=True):
            for tensor in group.tensors:
                shape = kv_cache_shape(layout, count, tensor.shape, member=_member(layout, tensor))
                self.tensors[tensor.layer, tensor.name] = _allocate(
                    shape, cache_dtype(tensor, dtype), device
                )

    def __getitem__(self, key: tuple[int, str]) -> Tensor:
        """Return a layer's cache of that name."""
        return self.tensors[key]

    def num_bytes(self, group: CacheGroup) -> int:
        """Return the bytes of a group's tensors."""
        return sum(self[tensor.layer, tensor.name].nbytes for tensor in group.tensors)

    def copy(self, group: int, source_ids: Tensor, target_ids: Tensor) -> None:
        """Copy blocks of all a group's caches; nothing where the target is the null block.

        Args:
            group: The group's index.
            source_ids: Blocks to copy from, [N] int64 or int32.
            target_ids: Blocks to copy to, of the same shape.
        """
        for tensor in self._groups[group].tensors:
            cache = self[tensor.layer, tensor.name]
            write(cache, target_ids, cache[source_ids])


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:
        # torch raises the latter for a number beyond int64
        num_bytes = math.prod(shape) * dtype.itemsize
        raise BadInputError(
            f"a cache of {shape[0]:,} blocks takes {num_bytes:,} bytes, and {device} does not "
            "give them: make num_blocks smaller",
            num_blocks=shape[0],
            num_bytes=num_bytes,
        ) from error


def _member(layout: BlockTableLayout, tensor: CachedTensor) -> str | None:
    return tensor.name if isinstance(layout.spec, UniformSpec) else None
