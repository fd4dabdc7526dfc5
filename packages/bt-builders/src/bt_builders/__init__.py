"""Attention metadata for the DSA indexer, MLA and Mamba, cut to the block table's planned width."""

from .agreement.backend import AttentionBackend, AttentionGroup
from .agreement.composite import compose_builders
from .agreement.create import create_metadata_builders
from .agreement.declarations import CudagraphSupport
from .agreement.kernel_rules import KERNEL_RULES, KernelRule
from .agreement.protocol import (
    BuilderClass,
    CudagraphLevel,
    MetadataBuilder,
    PlainBuilder,
    PlainBuilderClass,
    WidthBuilder,
    WidthBuilderClass,
)
from .agreement.setup import (
    AttentionSetup,
    PlannedGroup,
    init_attention,
    prepare_kernel_block_sizes,
)
from .batch.common import AttentionBatch, CommonAttentionMetadata
from .batch.geometry import local_lengths
from .batch.guard import BatchGuard
from .batch.ubatches import split_ubatches
from .dsa.builder import DSAIndexerMetadataBuilder
from .dsa.metadata import DSADecodeMetadata, DSAIndexerMetadata, DSAPrefillChunk
from .dsa.options import DSAOptions
from .dsa.ring import RingTailMetadata, RingTailMetadataBuilder
from .mamba.builder import MambaMetadataBuilder
from .mamba.metadata import (
    MambaChunks,
    MambaDecodeMetadata,
    MambaMetadata,
    MambaPrefillMetadata,
    MambaStates,
    SettledStates,
)
from .mamba.options import MambaOptions
from .mla.builder import MLAMetadataBuilder
from .mla.metadata import MLAContextChunk, MLADecodeMetadata, MLAMetadata, MLAPrefillMetadata
from .mla.options import MLAOptions

__version__ = "0.1.0"

__all__ = [
    "KERNEL_RULES",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionGroup",
    "AttentionSetup",
    "BatchGuard",
    "BuilderClass",
    "CommonAttentionMetadata",
    "CudagraphLevel",
    "CudagraphSupport",
    "DSADecodeMetadata",
    "DSAIndexerMetadata",
    "DSAIndexerMetadataBuilder",
    "DSAOptions",
    "DSAPrefillChunk",
    "KernelRule",
    "MLAContextChunk",
    "MLADecodeMetadata",
    "MLAMetadata",
    "MLAMetadataBuilder",
    "MLAOptions",
    "MLAPrefillMetadata",
    "MambaChunks",
    "MambaDecodeMetadata",
    "MambaMetadata",
    "MambaMetadataBuilder",
    "MambaOptions",
    "MambaPrefillMetadata",
    "MambaStates",
    "MetadataBuilder",
    "PlainBuilder",
    "PlainBuilderClass",
    "PlannedGroup",
    "RingTailMetadata",
    "RingTailMetadataBuilder",
    "SettledStates",
    "WidthBuilder",
    "WidthBuilderClass",
    "__version__",
    "compose_builders",
    "create_metadata_builders",
    "init_attention",
    "local_lengths",
    "prepare_kernel_block_sizes",
    "split_ubatches",
]
