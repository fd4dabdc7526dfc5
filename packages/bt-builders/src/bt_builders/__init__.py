"""Attention metadata for the DSA indexer, MLA and Mamba, cut to the block table's planned width."""

from .backend import AttentionBackend, AttentionGroup
from .batch import AttentionBatch
from .common import CommonAttentionMetadata, local_lengths, local_lengths_of_ranks
from .contexts import ContextSpan, MLAContextChunk, pack_contexts
from .create import compose_builders, create_metadata_builders
from .dsa import (
    ChunkPlan,
    DSADecodeMetadata,
    DSAIndexerMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    DSAPrefillChunk,
    plan_prefill_chunks,
)
from .guard import BatchGuard
from .kernel_rules import (
    CUTLASS_MLA,
    DEEPGEMM_PAGED_MQA_SM90,
    DEEPGEMM_PAGED_MQA_SM100,
    DEEPGEMM_PAGED_MQA_SM120,
    FLASH_ATTENTION_MLA,
    FLASHINFER_MLA,
    FLASHINFER_SPARSE_MLA,
    FLASHMLA_DENSE,
    FLASHMLA_DENSE_BATCH_INVARIANT,
    FLASHMLA_SPARSE,
    KERNEL_RULES,
    TRITON_MLA,
    KernelRule,
)
from .mamba import (
    MambaChunks,
    MambaDecodeMetadata,
    MambaMetadata,
    MambaMetadataBuilder,
    MambaOptions,
    MambaPrefillMetadata,
)
from .mla import (
    MLADecodeMetadata,
    MLAMetadata,
    MLAMetadataBuilder,
    MLAOptions,
    MLAPrefillMetadata,
)
from .operations import CommittedStates, MambaStates
from .protocol import (
    BuilderClass,
    CudagraphLevel,
    CudagraphSupport,
    MetadataBuilder,
    PlainBuilder,
    PlainBuilderClass,
    WidthBuilder,
    WidthBuilderClass,
)
from .ring import RingTailMetadata, RingTailMetadataBuilder
from .setup import AttentionSetup, PlannedGroup, init_attention, prepare_kernel_block_sizes
from .split import BatchSplit, split_decodes_and_prefills, split_ubatches

__version__ = "0.1.0"

__all__ = [
    "CUTLASS_MLA",
    "DEEPGEMM_PAGED_MQA_SM90",
    "DEEPGEMM_PAGED_MQA_SM100",
    "DEEPGEMM_PAGED_MQA_SM120",
    "FLASHINFER_MLA",
    "FLASHINFER_SPARSE_MLA",
    "FLASHMLA_DENSE",
    "FLASHMLA_DENSE_BATCH_INVARIANT",
    "FLASHMLA_SPARSE",
    "FLASH_ATTENTION_MLA",
    "KERNEL_RULES",
    "TRITON_MLA",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionGroup",
    "AttentionSetup",
    "BatchGuard",
    "BatchSplit",
    "BuilderClass",
    "ChunkPlan",
    "CommittedStates",
    "CommonAttentionMetadata",
    "ContextSpan",
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
    "WidthBuilder",
    "WidthBuilderClass",
    "__version__",
    "compose_builders",
    "create_metadata_builders",
    "init_attention",
    "local_lengths",
    "local_lengths_of_ranks",
    "pack_contexts",
    "plan_prefill_chunks",
    "prepare_kernel_block_sizes",
    "split_decodes_and_prefills",
    "split_ubatches",
]
