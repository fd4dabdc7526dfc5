"""The memory behind the tables: which caches there are, and how a slot is read and written.

B and N rows, W columns, S tokens of a row, D numbers of a state; a kernel block holds
``kernel_block_size`` of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MambaOptions,
    MLAMetadataBuilder,
)
from bt_runner.arguments import require_int
from bt_runner.memory import memory_refused, require_memory
from bt_runner.models.config import (
    MLA,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectTopK,
)
from bt_tables import kv_cache_shape
from bt_width import NULL_BLOCK, AttentionSpec, BlockTableLayout, MambaSpec, MultipleOf, UniformSpec
from bt_width.specs import MambaMode

CHUNK_SIZE = 64
"""Tokens of a prompt whose recurrent states are computed together."""

DENSE, SPARSE, MAMBA = "dense", "sparse", "mamba"
LARGEST_BLOCK = 2**16
"""Tokens of a block beyond which a size is taken for a slip."""

LATENT, INDEX, CONV, STATE = "latent", "index", "conv", "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How a model's caches are cut.

    Attributes:
        attention_block_size: Tokens of a block of the dense layers.
        sparse_block_size: Tokens of a block of the layers that an indexer serves.
        kernel_block_sizes: What the attention kernels take.
        mamba_block_size: Tokens between two kept states (mode "align").
        mamba_mode: Whether states are kept along the way.
        num_speculative_blocks: Further states a request, for drafts.
    """

    attention_block_size: int = 32
    sparse_block_size: int = 64
    kernel_block_sizes: tuple[int | MultipleOf, ...] = (32, MultipleOf(64))
    mamba_block_size: int = 128
    mamba_mode: MambaMode = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        """Refuse blocks that no memory holds; what else a group demands, its plan says."""
        for name in ("attention_block_size", "sparse_block_size", "mamba_block_size"):
            require_int(name, getattr(self, name), minimum=1, maximum=LARGEST_BLOCK)
        require_int(
            "num_speculative_blocks", self.num_speculative_blocks, minimum=0, maximum=LARGEST_BLOCK
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTensor:
    """One cache of one layer.

    Attributes:
        layer: The layer.
        name: What it holds: ``LATENT``, ``INDEX``, ``CONV`` or ``STATE``.
        shape: The shape of one state.
        is_wide: Whether it is at least float32, whatever the model's dtype.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a table.

    Attributes:
        attention: The group as the builders know it.
        tensors: The caches of its layers.
    """

    attention: AttentionGroup
    tensors: tuple[CachedTensor, ...]

    @property
    def name(self) -> str:
        """The group's name."""
        return self.attention.name

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len({tensor.layer for tensor in self.tensors})


def cache_groups(config: ModelConfig, options: CacheOptions) -> tuple[CacheGroup, ...]:
    """Group the caches of a model's layers; groups without a layer are left out."""
    tensors: dict[str, list[CachedTensor]] = {name: [] for name in _GROUPS}
    for index, layer in enumerate(config.layers):
        match layer:
            case AttentionLayer(mla=mla, selection=SelectAll()):
                tensors[DENSE].append(_latent(index, mla))
            case AttentionLayer(mla=mla, selection=selection):
                tensors[SPARSE].append(_latent(index, mla))
                if isinstance(selection, SelectTopK):
                    shape = (selection.head_dim,)
                    tensors[SPARSE].append(CachedTensor(layer=index, name=INDEX, shape=shape))
            case MambaLayer():
                tensors[MAMBA] += _states(index, layer)
    return tuple(
        CacheGroup(attention=_GROUPS[name](options), tensors=tuple(of_group))
        for name, of_group in tensors.items()
        if of_group
    )


def _latent(index: int, mla: MLA) -> CachedTensor:
    return CachedTensor(layer=index, name=LATENT, shape=(mla.kv_lora_rank + mla.rope.dim,))


def _states(index: int, layer: MambaLayer) -> list[CachedTensor]:
    conv = (layer.conv_kernel - 1, layer.conv_channels)
    state = (layer.num_heads, layer.head_dim, layer.state_size)
    return [
        CachedTensor(layer=index, name=CONV, shape=conv),
        CachedTensor(layer=index, name=STATE, shape=state, is_wide=True),
    ]


def _dense(options: CacheOptions) -> AttentionGroup:
    mla = AttentionBackend(
        name="mla",
        builder_class=MLAMetadataBuilder,
        supported_kernel_block_sizes=options.kernel_block_sizes,
    )
    spec = AttentionSpec(block_size=options.attention_block_size)
    return AttentionGroup(name=DENSE, spec=spec, backends=(mla,))


def _sparse(options: CacheOptions) -> AttentionGroup:
    indexer = AttentionBackend(
        name="indexer",
        builder_class=DSAIndexerMetadataBuilder,
        supported_kernel_block_sizes=options.kernel_block_sizes,
    )
    member = AttentionSpec(block_size=options.sparse_block_size)
    spec = UniformSpec(members={LATENT: member, INDEX: member})
    return AttentionGroup(name=SPARSE, spec=spec, backends=(indexer,))


def _mamba(options: CacheOptions) -> AttentionGroup:
    mamba2 = AttentionBackend(
        name="mamba2",
        builder_class=MambaMetadataBuilder.configured(MambaOptions(chunk_size=CHUNK_SIZE)),
        supported_kernel_block_sizes=(MultipleOf(1),),
    )
    spec = MambaSpec(
        block_size=options.mamba_block_size,
        mode=options.mamba_mode,
        num_speculative_blocks=options.num_speculative_blocks,
    )
    return AttentionGroup(name=MAMBA, spec=spec, backends=(mamba2,))


_GROUPS = {DENSE: _dense, SPARSE: _sparse, MAMBA: _mamba}


def cache_dtype(tensor: CachedTensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a cache has in a model of ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if tensor.is_wide else dtype


def read_rows(cache: Tensor, block_table: Tensor, num_tokens: int) -> Tensor:
    """Return ``[B, S, D]``: each row's first tokens, with S at least ``num_tokens``.

    Args:
        cache: ``[kernel blocks, kernel_block_size, D]``.
        block_table: ``[B, W]``.
        num_tokens: The most tokens that are wanted of a row.
    """
    num_columns = -(-num_tokens // cache.shape[1])
    blocks = cache[block_table[:, :num_columns]]
    return blocks.flatten(1, 2)


def read_slots(cache: Tensor, slots: Tensor) -> Tensor:
    """Return ``[..., D]`` for ``slots`` [...]; where a slot is padding, the null block's row."""
    return cache.flatten(0, 1)[slots.clamp(min=NULL_BLOCK)]


def slots_at(
    block_table: Tensor, rows: Tensor, positions: Tensor, kernel_block_size: int
) -> Tensor:
    """Return where local ``positions`` of ``rows`` lie; anything where a position is negative.

    Args:
        block_table: ``[N, W]``.
        rows: The table row of each position, broadcast against them.
        positions: Places on this rank, int64.
        kernel_block_size: Tokens of a column.
    """
    places = positions.clamp(min=0)
    columns = places // kernel_block_size
    blocks = block_table[rows, columns].to(torch.int64)
    return blocks * kernel_block_size + places % kernel_block_size


def read_line(
    cache: Tensor, block_table: Tensor, starts: Tensor, num_tokens: int, skipped: Tensor
) -> Tensor:
    """Return ``[num_tokens, D]``: a span of each row's tokens, one after the other.

    Args:
        cache: ``[kernel blocks, kernel_block_size, D]``.
        block_table: ``[B, W]``.
        starts: ``[B + 1]``, where each span begins; past the last of them the result
            is undefined and must not be read.
        num_tokens: The length of the line, at least ``starts[-1]``.
        skipped: ``[B]``, tokens of each row before its span.
    """
    places = torch.arange(num_tokens, device=cache.device)
    rows = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    rows = rows.clamp(max=block_table.shape[0] - 1)
    positions = places - starts[rows] + skipped[rows]
    width = block_table.shape[1] * cache.shape[1]
    slots = slots_at(block_table, rows, positions.clamp(max=width - 1), cache.shape[1])
    return cache.flatten(0, 1)[slots]


def write(cache: Tensor, places: Tensor, values: Tensor) -> None:
    """Write to places of a cache; where one is padding or null, nothing changes.

    Place 0 belongs to the null block: whatever is not to be kept is written there, and what
    was there comes back. Shapes do not depend on values, and nothing is read by the host.

    Args:
        cache: ``[places, ...]``, by block or by slot.
        places: ``[B]``; none twice but those that are padding or null.
        values: ``[B, ...]``.
    """
    null = cache[NULL_BLOCK].clone()
    cache[places.clamp(min=NULL_BLOCK)] = values.to(cache.dtype)
    cache[NULL_BLOCK] = null


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
