"""What published kernels ask for, number by number, and how states become tokens."""

from __future__ import annotations

import pytest

import bt_builders
from bt_builders import (
    DEEPGEMM_PAGED_MQA_SM100,
    KERNEL_RULES,
    DSAIndexerMetadataBuilder,
    KernelRule,
    MLAMetadataBuilder,
)
from bt_width import MultipleOf

pytestmark = pytest.mark.fast

PUBLISHED = {
    "flashinfer-mla": ((32, 64), 128, "tokens"),
    "cutlass-mla": ((128,), 128, "tokens"),
    "flashmla-dense": ((64,), None, "tokens"),
    "flashmla-dense-batch-invariant": ((64,), 4096, "tokens"),
    "flashmla-sparse": ((MultipleOf(64),), None, "tokens"),
    "flashinfer-sparse-mla": ((MultipleOf(32),), None, "tokens"),
    "flash-attention-mla": ((MultipleOf(16),), None, "tokens"),
    "triton-mla": ((MultipleOf(16),), None, "tokens"),
    "deepgemm-paged-mqa-sm90": ((32, 64), None, "states"),
    "deepgemm-paged-mqa-sm100": ((32, 64, 128), None, "states"),
    "deepgemm-paged-mqa-sm120": ((64,), None, "states"),
}
"""Block sizes, the span of a row, and the unit of both, as the kernels' own checks say."""


def test_each_rule_says_what_its_kernel_checks() -> None:
    """The second statement, so that a slip in either shows."""
    found = {rule.name: (rule.kernel_block_sizes, rule.span, rule.unit) for rule in KERNEL_RULES}

    assert found == PUBLISHED
    assert len(KERNEL_RULES) == len(PUBLISHED)


def test_every_rule_can_be_imported_by_its_name() -> None:
    for rule in KERNEL_RULES:
        name = rule.name.upper().replace("-", "_")

        assert getattr(bt_builders, name) is rule


def test_pages_in_states_are_tokens_times_the_ratio() -> None:
    """A page of 64 states at 4 tokens each is a kernel block of 256 tokens."""
    chosen = DEEPGEMM_PAGED_MQA_SM100.backend(DSAIndexerMetadataBuilder, tokens_per_state=4)

    assert chosen.supported_kernel_block_sizes == (128, 256, 512)


@pytest.mark.parametrize("rule", KERNEL_RULES, ids=lambda rule: rule.name)
def test_by_default_a_state_is_a_token(rule: KernelRule) -> None:
    chosen = rule.backend(MLAMetadataBuilder)

    assert chosen.supported_kernel_block_sizes == rule.kernel_block_sizes
    assert (chosen.span, chosen.span_unit) == (rule.span, rule.unit)


@pytest.mark.parametrize(
    ("unit", "expected"), [("states", (MultipleOf(48), 96)), ("tokens", (MultipleOf(16), 32))]
)
def test_multiples_are_counted_in_the_rules_unit_too(
    unit: str, expected: tuple[int | MultipleOf, ...]
) -> None:
    rule = KernelRule(name="rule", kernel_block_sizes=(MultipleOf(16), 32), unit=unit)  # type: ignore[arg-type]  # one of the two

    chosen = rule.backend(MLAMetadataBuilder, tokens_per_state=3)

    assert chosen.supported_kernel_block_sizes == expected
