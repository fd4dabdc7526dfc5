"""Every public call of bt-builders refuses what it cannot do, in words and with its own error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.bad_values import Call, refuses_or_answers, spoiled_arguments
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import int32
from tests.support.plans import serving_limits

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    KernelRule,
    MambaMetadataBuilder,
    MambaOptions,
    MLAMetadataBuilder,
    MLAOptions,
    RingTailMetadataBuilder,
    compose_builders,
    create_metadata_builders,
    init_attention,
    local_lengths,
    prepare_kernel_block_sizes,
    split_ubatches,
)
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, RingSpec

pytestmark = pytest.mark.fast

Make = Callable[[], object]

LIMITS = serving_limits(100, num_speculative_tokens=1)
ATTENTION = BlockTableLayout.plan(AttentionSpec(block_size=16, tokens_per_state=2), LIMITS)
MAMBA = BlockTableLayout.plan(
    MambaSpec(block_size=16, mode="align", num_speculative_blocks=1), LIMITS
)
RING = BlockTableLayout.plan(RingSpec(block_size=4), LIMITS)
REQUESTS = [Request(40, 2), Request(30, 1), Request(20, 9, is_prefilling=True)]
BACKEND = AttentionBackend(
    name="mla", builder_class=MLAMetadataBuilder, supported_kernel_block_sizes=[16]
)
GROUP = AttentionGroup(name="mla", spec=AttentionSpec(block_size=16), backends=(BACKEND,))


def make_batch_of(layout: BlockTableLayout) -> dict[str, Make]:
    """A good batch, field by field, each made anew."""

    def field_of(name: str) -> Make:
        return lambda: getattr(make_batch(layout, REQUESTS), name)

    return {field.name: field_of(field.name) for field in fields(CommonAttentionMetadata)}


def dsa() -> DSAIndexerMetadataBuilder:
    return DSAIndexerMetadataBuilder(ATTENTION, "cpu", block_table_width=ATTENTION.width)


def building(name: str, layout: BlockTableLayout, build: Callable[[Any], object]) -> Call:
    return Call(
        name,
        lambda **parts: build(CommonAttentionMetadata(**parts)),
        make_batch_of(layout),
    )


def constructing(kind: Callable[..., object], layout: BlockTableLayout) -> Call:
    return Call(str(kind), kind, {"layout": lambda: layout, "device": lambda: "cpu"})


def table() -> torch.Tensor:
    return make_batch(ATTENTION, REQUESTS).block_table


def commit_states(common: Any, num_accepted_tokens: Any) -> object:
    return MambaMetadataBuilder(MAMBA, "cpu").commit_states(common, num_accepted_tokens)


def spec() -> CacheSpec:
    return AttentionSpec(block_size=16)


CALLS = [
    building("DSA.build", ATTENTION, dsa().build),
    building("MLA.build", ATTENTION, MLAMetadataBuilder(ATTENTION, "cpu").build),
    building("Mamba.build", MAMBA, MambaMetadataBuilder(MAMBA, "cpu").build),
    building("Ring.build", RING, RingTailMetadataBuilder(RING, "cpu").build),
    building("split_ubatches", ATTENTION, lambda common: split_ubatches(common, [4])),
    constructing(MLAMetadataBuilder, ATTENTION),
    constructing(MambaMetadataBuilder, MAMBA),
    constructing(RingTailMetadataBuilder, RING),
    Call(
        "DSA",
        DSAIndexerMetadataBuilder,
        {
            "layout": lambda: ATTENTION,
            "device": lambda: "cpu",
            "block_table_width": lambda: ATTENTION.width,
        },
    ),
    Call("DSA.build", lambda common: dsa().build(common), {"common": lambda: None}),
    Call(
        "commit_states",
        commit_states,
        {
            "common": lambda: make_batch(MAMBA, REQUESTS),
            "num_accepted_tokens": lambda: int32([1, 1, 9]),
        },
    ),
    Call(
        "start_drafts",
        lambda **parts: dsa().start_drafts(**parts),
        {"block_table": table, "seq_lens": lambda: int32([40, 30, 20])},
    ),
    Call("advance_drafts", lambda **parts: dsa().advance_drafts(**parts), {"block_table": table}),
    Call(
        "cuts",
        split_ubatches,
        {"common": lambda: make_batch(ATTENTION, REQUESTS), "cuts": lambda: [2, 5]},
    ),
    Call(
        "local_lengths",
        local_lengths,
        {"seq_lens": lambda: int32([3]), "layout": lambda: ATTENTION},
    ),
    Call("prepare", prepare_kernel_block_sizes, {"groups": lambda: [GROUP]}),
    Call(
        "init_attention",
        init_attention,
        {
            "groups": lambda: [GROUP],
            "limits": lambda: LIMITS,
            "device": lambda: "cpu",
            "num_ubatches": lambda: 1,
        },
    ),
    Call(
        "create_metadata_builders",
        create_metadata_builders,
        {
            "layout": lambda: ATTENTION,
            "builder_classes": lambda: [MLAMetadataBuilder],
            "device": lambda: "cpu",
            "num_ubatches": lambda: 1,
        },
    ),
    Call(
        "AttentionGroup",
        lambda **parts: prepare_kernel_block_sizes([AttentionGroup(**parts)]),
        {"name": lambda: "group", "spec": spec, "backends": lambda: (BACKEND,)},
    ),
    Call(
        "AttentionBackend",
        lambda **parts: init_attention(
            [AttentionGroup(name="group", spec=spec(), backends=(AttentionBackend(**parts),))],
            LIMITS,
            "cpu",
        ),
        {
            "name": lambda: "backend",
            "builder_class": lambda: MLAMetadataBuilder,
            "supported_kernel_block_sizes": lambda: [16],
            "span": lambda: 128,
            "span_unit": lambda: "tokens",
        },
    ),
    Call("compose_builders", lambda part: compose_builders(part), {"part": lambda: dsa}),
    Call(
        "KernelRule.backend",
        KernelRule(name="rule", kernel_block_sizes=(16,), unit="states").backend,
        {"builder_class": lambda: MLAMetadataBuilder, "tokens_per_state": lambda: 2},
    ),
    Call(
        "DSAOptions",
        DSAOptions,
        {
            "native_query_lens": lambda: {1},
            "workspace_tokens": lambda: 64,
            "max_logits_bytes": lambda: 64,
            "member": lambda: None,
        },
    ),
    Call(
        "MLAOptions",
        MLAOptions,
        {
            "max_decode_query_len": lambda: None,
            "uniform_decodes": lambda: False,
            "workspace_tokens": lambda: 64,
        },
    ),
    Call("MambaOptions", MambaOptions, {"chunk_size": lambda: 8, "state_pad": lambda: 0}),
    *(
        Call(f"{kind.__name__}.configured", kind.configured, {"options": lambda: None})
        for kind in (DSAIndexerMetadataBuilder, MLAMetadataBuilder, MambaMetadataBuilder)
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_bad_arguments_end_in_the_projects_own_error(call: Call, data: st.DataObject) -> None:
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))


@pytest.mark.long
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_more_bad_arguments_do(call: Call, data: st.DataObject) -> None:
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))
