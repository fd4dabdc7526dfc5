"""A planned model's cache groups with the builders that their layers need."""

from __future__ import annotations

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    BuilderClass,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
)
from bt_width import ModelGroup, MultipleOf

_BUILDERS: dict[str, BuilderClass] = {
    "mla": MLAMetadataBuilder,
    "indexer": DSAIndexerMetadataBuilder,
    # plain attention reads what MLA does: rows, lengths and chunks of context
    "attention": MLAMetadataBuilder,
    "window": MLAMetadataBuilder,
    "mamba": MambaMetadataBuilder,
}


def attention_group(group: ModelGroup, kernel_block_size: int | None) -> AttentionGroup:
    """Return a model's group as the builders know it.

    Args:
        group: The group.
        kernel_block_size: The only size that its attention kernels take; None for any.
    """
    taken = MultipleOf(1)
    sizes = (taken if kernel_block_size is None or group.name == "mamba" else kernel_block_size,)
    backends = tuple(
        AttentionBackend(
            name=member.name,
            builder_class=_BUILDERS[member.name],
            supported_kernel_block_sizes=sizes,
        )
        for member in group.members
    )
    return AttentionGroup(name=group.name, spec=group.spec, backends=backends)
