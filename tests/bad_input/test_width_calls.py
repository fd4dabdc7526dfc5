"""Every public call of bt-width refuses what it cannot answer, in its own words."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.bad_values import Call, refuses_or_answers, spoiled_arguments
from tests.support.plans import plan, serving_limits

import bt_width
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    ContextParallel,
    MambaSpec,
    MultipleOf,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

LAYOUTS = [
    plan(AttentionSpec(block_size=32), 100, kernel_block_size=16, size=2, rank=1),
    plan(SlidingWindowSpec(block_size=16, window=20), 100),
    plan(MambaSpec(block_size=16, mode="align", num_speculative_blocks=1), 100),
    plan(RingSpec(block_size=4), 100),
]


def _calls_of(layout: BlockTableLayout) -> list[Call]:
    kind = f"{layout.kind} layout"
    return [
        Call(f"{kind}.num_blocks", layout.num_blocks, {"num_tokens": lambda: 9}),
        Call(f"{kind}.state_column", layout.state_column, {"num_tokens": lambda: 9}),
        Call(
            f"{kind}.num_expired_blocks",
            layout.num_expired_blocks,
            {"num_computed_tokens": lambda: 9},
        ),
        Call(f"{kind}.locate", layout.locate, {"position": lambda: 9}),
        Call(f"{kind}.expand", layout.expand, {"block_ids": lambda: [7]}),
        Call(f"{kind}.tokens_per_state", layout.tokens_per_state, {"member": lambda: None}),
        Call(
            f"{kind}.slot",
            layout.slot,
            {"position": lambda: 9, "kernel_block_ids": lambda: [14, 15]},
        ),
        Call(
            f"{kind}.local_length", layout.local_length, {"seq_len": lambda: 9, "rank": lambda: 0}
        ),
        Call(
            f"{kind}.max_resident_blocks",
            layout.max_resident_blocks,
            {"max_in_flight_tokens": lambda: 9},
        ),
    ]


def _one(value: Any) -> Any:
    return lambda: value


CALLS = [
    *(call for layout in LAYOUTS for call in _calls_of(layout)),
    Call(
        "get_block_table_width",
        bt_width.get_block_table_width,
        {
            "max_num_blocks": _one(9),
            "block_size": _one(32),
            "kernel_block_size": _one(16),
            "token_alignment": _one(128),
        },
    ),
    Call(
        "AttentionSpec",
        AttentionSpec,
        {
            "block_size": _one(32),
            "sharded": _one(True),
            "tokens_per_state": _one(4),
            "token_alignment": _one(None),
        },
    ),
    Call(
        "SlidingWindowSpec",
        SlidingWindowSpec,
        {
            "block_size": _one(32),
            "window": _one(100),
            "extra_retained_tokens": _one(1),
            "token_alignment": _one(128),
        },
    ),
    Call(
        "MambaSpec",
        MambaSpec,
        {"block_size": _one(32), "mode": _one("align"), "num_speculative_blocks": _one(1)},
    ),
    Call("RingSpec", RingSpec, {"block_size": _one(4)}),
    Call("UniformSpec", UniformSpec, {"members": lambda: {"a": RingSpec(block_size=4)}}),
    Call(
        "UniformSpec of one member",
        lambda name, member: UniformSpec(members=[(name, member)]),
        {"name": _one("a"), "member": _one(RingSpec(block_size=4))},
    ),
    Call(
        "ContextParallel",
        ContextParallel,
        {"size": _one(4), "rank": _one(1), "interleave": _one(2)},
    ),
    Call(
        "ServingLimits",
        ServingLimits,
        {
            "max_model_len": _one(100),
            "max_num_reqs": _one(4),
            "max_num_batched_tokens": _one(64),
            "num_speculative_tokens": _one(1),
            "lookahead_tokens": _one(1),
            "context_parallel": lambda: ContextParallel(size=2),
        },
    ),
    Call(
        "BlockTableLayout.plan",
        BlockTableLayout.plan,
        {
            "spec": lambda: AttentionSpec(block_size=32),
            "limits": lambda: serving_limits(100),
            "kernel_block_size": _one(16),
        },
    ),
    Call(
        "BlockTableLayout",
        BlockTableLayout,
        {
            "spec": lambda: AttentionSpec(block_size=32),
            "limits": lambda: serving_limits(100),
            "kernel_block_size": _one(16),
        },
    ),
    Call("BlockTableLayout.from_json", BlockTableLayout.from_json, {"text": LAYOUTS[0].to_json}),
    Call("MultipleOf", MultipleOf, {"n": _one(16)}),
    Call(
        "select_kernel_block_size",
        bt_width.select_kernel_block_size,
        {"block_size": _one(64), "supported": lambda: [[16, 32], [MultipleOf(16)]]},
    ),
    Call(
        "select_kernel_block_size by name",
        lambda block_size, sizes: bt_width.select_kernel_block_size(block_size, {"a": sizes}),
        {"block_size": _one(64), "sizes": lambda: [16, MultipleOf(32)]},
    ),
    Call(
        "max_addressable_blocks",
        bt_width.max_addressable_blocks,
        {"elements_per_block": _one(4096)},
    ),
    Call(
        "longest_request",
        bt_width.longest_request,
        {
            "layout": _one(LAYOUTS[1]),
            "num_blocks": _one(8),
            "max_in_flight_tokens": _one(16),
        },
    ),
    *(
        Call(name, getattr(bt_width, name), {"layout": _one(LAYOUTS[0])})
        for name in ("index_buffer_bytes", "row_bytes", "table_bytes", "addressable_tokens")
    ),
    Call("tables_bytes", bt_width.tables_bytes, {"layouts": _one(LAYOUTS)}),
]


def assert_bad_input_is_refused(data: st.DataObject) -> None:
    call = data.draw(st.sampled_from(CALLS))
    refuses_or_answers(call, data.draw(spoiled_arguments(call)))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_arguments_that_are_spoiled_were_good(call: Call) -> None:
    """A call that refuses anyway would prove nothing."""
    good = {name: make() for name, make in call.good.items()}
    if call.name.split(".")[-1] in ("locate", "state_column"):
        pytest.skip("some kinds have no slots, some no states")

    call.function(**good)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)


@pytest.mark.long
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_much_bad_input_is_refused(data: st.DataObject) -> None:
    assert_bad_input_is_refused(data)
