"""Every public call of bt-builders refuses what it cannot build, and builds the next batch."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.bad_values import Call, refuses_or_answers, spoiled_arguments
from tests.support.batches import Request, make_batch
from tests.support.plans import serving_limits

import bt_builders
from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
)
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, MultipleOf, RingSpec

LIMITS = serving_limits(
    64, max_num_reqs=4, max_num_batched_tokens=16, num_speculative_tokens=1, lookahead_tokens=1
)
SPEC = AttentionSpec(block_size=16)
LAYOUT = BlockTableLayout.plan(SPEC, LIMITS, 8)
STATES = BlockTableLayout.plan(MambaSpec(block_size=16, num_speculative_blocks=1), LIMITS)
RING = BlockTableLayout.plan(RingSpec(block_size=4), LIMITS)
REQUESTS = [
    Request(seq_len=20, query_len=2),
    Request(seq_len=9, query_len=1),
    Request(seq_len=7, query_len=7, is_prefilling=True),
]
FIELDS = [field.name for field in fields(CommonAttentionMetadata)]


def builders() -> list[tuple[BlockTableLayout, MetadataBuilder[object]]]:
    return [
        (LAYOUT, DSAIndexerMetadataBuilder(LAYOUT, "cpu", block_table_width=LAYOUT.width)),
        (LAYOUT, MLAMetadataBuilder(LAYOUT, "cpu")),
        (STATES, MambaMetadataBuilder(STATES, "cpu")),
        (RING, RingTailMetadataBuilder(RING, "cpu")),
    ]


def plainly(value: Any) -> Any:
    """Return metadata as what ``==`` can compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plainly(getattr(value, field.name))
            for field in fields(value)
            if field.name != "layout"
        }
    if isinstance(value, (list, tuple)):
        return [plainly(part) for part in value]
    return value


def batch_of(layout: BlockTableLayout) -> CommonAttentionMetadata:
    return make_batch(layout, REQUESTS, num_reqs=4, num_tokens=12)


BUILT = [plainly(builder.build(batch_of(layout))) for layout, builder in builders()]


def build_call(index: int) -> Call:
    layout, builder = builders()[index]
    good = batch_of(layout)

    def unharmed() -> None:
        assert plainly(builder.build(batch_of(layout))) == BUILT[index]

    return Call(
        f"{type(builder).__name__}.build",
        lambda **parts: builder.build(CommonAttentionMetadata(**parts)),
        {name: partial(getattr, good, name) for name in FIELDS},
        unharmed,
    )


def constructor_call(kind: Any, layout: BlockTableLayout) -> Call:
    good: dict[str, Callable[[], object]] = {"layout": lambda: layout, "device": lambda: "cpu"}
    if kind is DSAIndexerMetadataBuilder:
        good["block_table_width"] = lambda: layout.width
    return Call(kind.__name__, kind, good)


def backend(**changes: Any) -> AttentionBackend:
    good: dict[str, Any] = {
        "name": "mla",
        "builder_class": MLAMetadataBuilder,
        "supported_kernel_block_sizes": [MultipleOf(8)],
    }
    return AttentionBackend(**{**good, **changes})


def group(spec: CacheSpec = SPEC) -> AttentionGroup:
    return AttentionGroup(name="full", spec=spec, backends=(backend(),))


CALLS: list[tuple[str, Callable[[], Call]]] = [
    ("build of the indexer", lambda: build_call(0)),
    ("build of MLA", lambda: build_call(1)),
    ("build of Mamba", lambda: build_call(2)),
    ("build of a ring's tail", lambda: build_call(3)),
    ("indexer", lambda: constructor_call(DSAIndexerMetadataBuilder, LAYOUT)),
    ("MLA", lambda: constructor_call(MLAMetadataBuilder, LAYOUT)),
    ("Mamba", lambda: constructor_call(MambaMetadataBuilder, STATES)),
    ("ring's tail", lambda: constructor_call(RingTailMetadataBuilder, RING)),
    (
        "AttentionBackend",
        lambda: Call(
            "AttentionBackend",
            AttentionBackend,
            {
                "name": lambda: "mla",
                "builder_class": lambda: MLAMetadataBuilder,
                "supported_kernel_block_sizes": lambda: [8, MultipleOf(16)],
                "span": lambda: 128,
                "span_unit": lambda: "tokens",
            },
        ),
    ),
    (
        "AttentionGroup",
        lambda: Call(
            "AttentionGroup",
            AttentionGroup,
            {"name": lambda: "full", "spec": lambda: SPEC, "backends": lambda: (backend(),)},
        ),
    ),
    (
        "prepare_kernel_block_sizes",
        lambda: Call(
            "prepare_kernel_block_sizes",
            bt_builders.prepare_kernel_block_sizes,
            {"groups": lambda: [group()]},
        ),
    ),
    (
        "create_metadata_builders",
        lambda: Call(
            "create_metadata_builders",
            bt_builders.create_metadata_builders,
            {
                "layout": lambda: LAYOUT,
                "builder_classes": lambda: [DSAIndexerMetadataBuilder, MLAMetadataBuilder],
                "device": lambda: "cpu",
                "num_ubatches": lambda: 2,
            },
        ),
    ),
    (
        "init_attention",
        lambda: Call(
            "init_attention",
            bt_builders.init_attention,
            {
                "groups": lambda: [group()],
                "limits": lambda: LIMITS,
                "device": lambda: "cpu",
                "num_ubatches": lambda: 1,
            },
        ),
    ),
    (
        "init_attention with a backend",
        lambda: Call(
            "init_attention with a backend",
            lambda span, sizes: bt_builders.init_attention(
                [
                    AttentionGroup(
                        name="full",
                        spec=SPEC,
                        backends=(backend(span=span, supported_kernel_block_sizes=sizes),),
                    )
                ],
                LIMITS,
                "cpu",
            ),
            {"span": lambda: 64, "sizes": lambda: [16]},
        ),
    ),
    (
        "split_ubatches",
        lambda: Call(
            "split_ubatches",
            bt_builders.split_ubatches,
            {"common": lambda: batch_of(LAYOUT), "cuts": lambda: [4]},
        ),
    ),
    (
        "split_ubatches of a batch",
        lambda: Call(
            "split_ubatches of a batch",
            lambda **parts: bt_builders.split_ubatches(CommonAttentionMetadata(**parts), [3, 5]),
            {name: partial(getattr, batch_of(LAYOUT), name) for name in FIELDS},
        ),
    ),
    (
        "local_lengths",
        lambda: Call(
            "local_lengths",
            bt_builders.local_lengths,
            {
                "seq_lens": lambda: torch.tensor([3, 9], dtype=torch.int32),
                "layout": lambda: LAYOUT,
            },
        ),
    ),
    (
        "compose_builders",
        lambda: Call(
            "compose_builders",
            lambda part: bt_builders.compose_builders(part, MLAMetadataBuilder),
            {"part": lambda: DSAIndexerMetadataBuilder},
        ),
    ),
    (
        "DSAOptions",
        lambda: Call(
            "DSAOptions",
            bt_builders.DSAOptions,
            {
                "native_query_lens": lambda: frozenset({1, 2}),
                "workspace_tokens": lambda: 64,
                "max_logits_bytes": lambda: 64,
                "member": lambda: None,
            },
        ),
    ),
    (
        "MLAOptions",
        lambda: Call(
            "MLAOptions",
            bt_builders.MLAOptions,
            {
                "max_decode_query_len": lambda: 2,
                "uniform_decodes": lambda: True,
                "workspace_tokens": lambda: 64,
            },
        ),
    ),
    (
        "MambaOptions",
        lambda: Call(
            "MambaOptions",
            bt_builders.MambaOptions,
            {"chunk_size": lambda: 4, "state_pad": lambda: -1},
        ),
    ),
]


def draw_call(data: st.DataObject) -> Call:
    _, make = data.draw(st.sampled_from(CALLS))
    return make()


def assert_bad_input_is_refused(data: st.DataObject) -> None:
    call = draw_call(data)
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))


@pytest.mark.parametrize("make", [make for _, make in CALLS], ids=[name for name, _ in CALLS])
def test_the_arguments_that_are_spoiled_were_good(make: Callable[[], Call]) -> None:
    """A call that refuses anyway would prove nothing."""
    call = make()

    call.function(**{name: value() for name, value in call.good.items()})
    call.unharmed()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_much_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)
