"""A model's caches put into groups that share a table, as the builders know them."""

from __future__ import annotations

from dataclasses import dataclass

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    BuilderClass,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
)
from bt_runner.geometry.caches import (
    IndexCache,
    KeyValueCache,
    LatentCache,
    ModelGeometry,
    StateCache,
)
from bt_runner.geometry.members import CacheMember, dtype_bytes, state_member, token_member
from bt_width import AttentionSpec, CacheSpec, MambaSpec, MultipleOf, UniformSpec
from bt_width.specs import MambaMode

_BUILDERS: dict[str, BuilderClass] = {
    LatentCache.name: MLAMetadataBuilder,
    IndexCache.name: DSAIndexerMetadataBuilder,
    # plain attention reads what MLA does: rows, lengths and chunks of context
    KeyValueCache.name: MLAMetadataBuilder,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """How a model's caches are cut.

    Attributes:
        block_size: Tokens of a block.
        kernel_block_size: Tokens of a kernel block, where attention kernels take one size only.
        mamba_block_size: Tokens between two kept states; ``block_size`` by default.
        mamba_mode: Whether states are kept along the way.
        num_speculative_blocks: Further states a request, for drafts.
        cache_dtype: The dtype of keys, values and latents; the model's by default.
    """

    block_size: int = 64
    kernel_block_size: int | None = None
    mamba_block_size: int | None = None
    mamba_mode: MambaMode = "none"
    num_speculative_blocks: int = 0
    cache_dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometryGroup:
    """Layers that share a table.

    Attributes:
        attention: The group as the builders know it.
        members: What its layers keep.
    """

    attention: AttentionGroup
    members: tuple[CacheMember, ...]

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer expands the group's table."""
        return any(member.name == IndexCache.name for member in self.members)


def geometry_groups(geometry: ModelGeometry, options: CutOptions) -> tuple[GeometryGroup, ...]:
    """Group what a model's layers keep; groups without a layer are left out.

    Raises:
        BadInputError: A dtype has no known size, or none is named.
    """
    num_bytes = dtype_bytes(options.cache_dtype or geometry.dtype)
    groups = []
    for kinds in ((LatentCache, IndexCache), (KeyValueCache,)):
        members = [token_member(geometry, kind, num_bytes) for kind in kinds]
        kept = tuple(member for member in members if member.num_layers)
        if kept:
            groups.append(GeometryGroup(attention=_attention_group(kept, options), members=kept))
    states = state_member(geometry, num_bytes)
    if states.num_layers:
        groups.append(GeometryGroup(attention=_mamba_group(options), members=(states,)))
    return tuple(groups)


def _attention_group(members: tuple[CacheMember, ...], options: CutOptions) -> AttentionGroup:
    taken = options.kernel_block_size
    backends = tuple(
        AttentionBackend(
            name=member.name,
            builder_class=_BUILDERS[member.name],
            supported_kernel_block_sizes=(MultipleOf(1) if taken is None else taken,),
        )
        for member in members
    )
    layer = AttentionSpec(block_size=options.block_size)
    spec: CacheSpec = layer
    if len(members) > 1:
        spec = UniformSpec(members={member.name: layer for member in members})
    return AttentionGroup(name=members[0].name, spec=spec, backends=backends)


def _mamba_group(options: CutOptions) -> AttentionGroup:
    block_size = options.mamba_block_size
    spec = MambaSpec(
        block_size=options.block_size if block_size is None else block_size,
        mode=options.mamba_mode,
        num_speculative_blocks=options.num_speculative_blocks,
    )
    mamba = AttentionBackend(
        name=StateCache.name,
        builder_class=MambaMetadataBuilder,
        supported_kernel_block_sizes=(MultipleOf(1),),
    )
    return AttentionGroup(name=StateCache.name, spec=spec, backends=(mamba,))
