"""Which caches a model's layers keep, and in which groups they share a table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MambaOptions,
    MLAMetadataBuilder,
)
from bt_runner.arguments import require_int
from bt_runner.models.config import (
    MLA,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectTopK,
)
from bt_width import AttentionSpec, MambaSpec, MultipleOf, UniformSpec
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
