"""Layouts that differ in one field alone, and specs that hold no default."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

# No field holds its default, so that a field that is not written cannot come back by chance.
LIMITS = ServingLimits(
    max_model_len=1001,
    max_num_reqs=5,
    max_num_batched_tokens=77,
    num_speculative_tokens=3,
    lookahead_tokens=6,
    context_parallel=ContextParallel(size=4, rank=2, interleave=16),
)
NOTHING_IS_DEFAULT: list[Any] = [
    pytest.param(
        AttentionSpec(block_size=64, sharded=False, tokens_per_state=4, token_alignment=None),
        16,
        id="attention",
    ),
    pytest.param(
        SlidingWindowSpec(block_size=64, window=99, extra_retained_tokens=5, token_alignment=256),
        16,
        id="window",
    ),
    pytest.param(MambaSpec(block_size=64, mode="align", num_speculative_blocks=3), 64, id="mamba"),
    pytest.param(RingSpec(block_size=4), 4, id="ring"),
    pytest.param(
        UniformSpec(
            members={
                "z": AttentionSpec(block_size=64, token_alignment=None),
                "a": AttentionSpec(block_size=64, tokens_per_state=8, token_alignment=None),
            }
        ),
        16,
        id="uniform",
    ),
]


def _layouts_that_differ_in_one_field() -> Iterator[Any]:
    """Every field of a layout changed alone."""
    spec = AttentionSpec(block_size=64)
    of_spec: dict[str, Any] = {
        "block_size": 128,
        "sharded": False,
        "tokens_per_state": 4,
        "token_alignment": None,
    }
    of_limits: dict[str, Any] = {
        "max_model_len": 1002,
        "max_num_reqs": 6,
        "max_num_batched_tokens": 78,
        "num_speculative_tokens": 2,
        "lookahead_tokens": 5,
    }
    for field, other in of_spec.items():
        changed = dataclasses.replace(spec, **{field: other})
        yield pytest.param(BlockTableLayout.plan(changed, LIMITS, 16), id=f"spec-{field}")
    for field, other in of_limits.items():
        limits = dataclasses.replace(LIMITS, **{field: other})
        yield pytest.param(BlockTableLayout.plan(spec, limits, 16), id=f"limits-{field}")
    for field, other in {"size": 3, "interleave": 8}.items():
        parallel = dataclasses.replace(LIMITS.context_parallel, **{field: other})
        limits = dataclasses.replace(LIMITS, context_parallel=parallel)
        yield pytest.param(BlockTableLayout.plan(spec, limits, 16), id=field)
    yield pytest.param(BlockTableLayout.plan(spec, LIMITS, 32), id="kernel_block_size")
    yield pytest.param(
        BlockTableLayout.plan(UniformSpec(members={"a": spec}), LIMITS, 16), id="wrapped"
    )
    yield pytest.param(
        BlockTableLayout.plan(SlidingWindowSpec(block_size=64, window=99), LIMITS, 16), id="kind"
    )


ONE_FIELD_APART = list(_layouts_that_differ_in_one_field())
