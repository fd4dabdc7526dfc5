"""Lists what published attention kernels ask of a block table, as data; checked when one is chosen.

Each rule says which kernel blocks a kernel reads and what its rows must span. The
planner meets both once; nothing is padded in a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from bt_width import MultipleOf

from ._checks import require_positive
from .backend import AttentionBackend, SpanUnit
from .protocol import BuilderClass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """One kernel's demands on the table.

    Attributes:
        name: The kernel.
        kernel_block_sizes: The pages it reads, counted in ``unit``.
        span: What a row must span a multiple of, counted in ``unit``, or None.
        unit: Tokens, or the states of a compressed cache.
        note: What else it asks for; every table here meets it.
    """

    name: str
    kernel_block_sizes: tuple[int | MultipleOf, ...]
    span: int | None = None
    unit: SpanUnit = "tokens"
    note: str = ""

    def backend(self, builder_class: BuilderClass, tokens_per_state: int = 1) -> AttentionBackend:
        """Return the backend of this kernel.

        Args:
            builder_class: The builder of its metadata.
            tokens_per_state: Tokens that share a state, where the kernel counts states.

        Raises:
            InvalidSpecError: ``tokens_per_state`` is not a positive int.
        """
        require_positive("tokens_per_state", tokens_per_state)
        ratio = tokens_per_state if self.unit == "states" else 1
        return AttentionBackend(
            name=self.name,
            builder_class=builder_class,
            supported_kernel_block_sizes=[
                MultipleOf(size.n * ratio) if isinstance(size, MultipleOf) else size * ratio
                for size in self.kernel_block_sizes
            ],
            span=self.span,
            span_unit=self.unit,
        )


FLASHINFER_MLA = KernelRule(
    name="flashinfer-mla",
    kernel_block_sizes=(32, 64),
    span=128,
    note="checked by releases that require an aligned block table",
)
CUTLASS_MLA = KernelRule(name="cutlass-mla", kernel_block_sizes=(128,), span=128)
FLASHMLA_DENSE = KernelRule(
    name="flashmla-dense",
    kernel_block_sizes=(64,),
    note="columns side by side, any row stride",
)
FLASHMLA_DENSE_BATCH_INVARIANT = KernelRule(
    name="flashmla-dense-batch-invariant",
    kernel_block_sizes=(64,),
    span=64 * 64,
    note="a width that is a multiple of 64 columns",
)
FLASHMLA_SPARSE = KernelRule(
    name="flashmla-sparse",
    kernel_block_sizes=(MultipleOf(64),),
    note="reads converted token indices, not the table",
)
FLASHINFER_SPARSE_MLA = KernelRule(
    name="flashinfer-sparse-mla", kernel_block_sizes=(MultipleOf(32),)
)
FLASH_ATTENTION_MLA = KernelRule(name="flash-attention-mla", kernel_block_sizes=(MultipleOf(16),))
TRITON_MLA = KernelRule(
    name="triton-mla", kernel_block_sizes=(MultipleOf(16),), note="indexes by length only"
)
DEEPGEMM_PAGED_MQA_SM90 = KernelRule(
    name="deepgemm-paged-mqa-sm90",
    kernel_block_sizes=(32, 64),
    unit="states",
    note="int32 table, columns side by side, row stride below 2^32, lengths in two dimensions",
)
DEEPGEMM_PAGED_MQA_SM100 = KernelRule(
    name="deepgemm-paged-mqa-sm100",
    kernel_block_sizes=(32, 64, 128),
    unit="states",
    note="as on sm90; one token a row where query lengths vary",
)

DEEPGEMM_PAGED_MQA_SM120 = KernelRule(
    name="deepgemm-paged-mqa-sm120",
    kernel_block_sizes=(64,),
    unit="states",
    note="as on sm90",
)

KERNEL_RULES = (
    FLASHINFER_MLA,
    CUTLASS_MLA,
    FLASHMLA_DENSE,
    FLASHMLA_DENSE_BATCH_INVARIANT,
    FLASHMLA_SPARSE,
    FLASHINFER_SPARSE_MLA,
    FLASH_ATTENTION_MLA,
    TRITON_MLA,
    DEEPGEMM_PAGED_MQA_SM90,
    DEEPGEMM_PAGED_MQA_SM100,
    DEEPGEMM_PAGED_MQA_SM120,
)
"""Every rule, in the order of the file."""
