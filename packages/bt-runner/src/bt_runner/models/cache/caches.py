"""The memory behind the tables: one tensor per layer and kind of state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bt_runner.memory import memory_refused, require_memory
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
        shapes = {
            tensor: kv_cache_shape(layout, count, tensor.shape, member=_member(layout, tensor))
            for group, layout, count in zip(groups, layouts, num_blocks, strict=True)
            for tensor in group.tensors
        }
        require_memory(
            f"caches of {max(num_blocks, default=0):,} blocks",
            sum(math.prod(shape) * cache_dtype(t, dtype).itemsize for t, shape in shapes.items()),
            device,
            advice="make num_blocks, max_num_reqs or max_model_len smaller",
        )
        with memory_refused():
            self.tensors = {
                (t.layer, t.name): torch.zeros(shape, dtype=cache_dtype(t, dtype), device=device)
                for t, shape in shapes.items()
            }

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


def _member(layout: BlockTableLayout, tensor: CachedTensor) -> str | None:
    return tensor.name if isinstance(layout.spec, UniformSpec) else None
