"""One spec of every kind of cache group, for what must hold of all of them."""

from typing import Any

import pytest

from bt_width import AttentionSpec, MambaSpec, RingSpec, SlidingWindowSpec, UniformSpec

ALIGN = MambaSpec(block_size=64, mode="align", num_speculative_blocks=2)
EVERY_KIND: list[Any] = [
    pytest.param(AttentionSpec(block_size=16), id="attention"),
    pytest.param(AttentionSpec(block_size=16, sharded=False), id="replicated-attention"),
    pytest.param(SlidingWindowSpec(block_size=16, window=64), id="window"),
    pytest.param(MambaSpec(block_size=16, num_speculative_blocks=2), id="mamba-none"),
    pytest.param(ALIGN, id="mamba-align"),
    pytest.param(RingSpec(block_size=4), id="ring"),
    pytest.param(
        UniformSpec(
            members={
                "indexer": AttentionSpec(block_size=64, tokens_per_state=4),
                "mla": AttentionSpec(block_size=64),
            }
        ),
        id="uniform",
    ),
]
SLOTLESS: list[Any] = [
    pytest.param(MambaSpec(block_size=16), id="mamba-none"),
    pytest.param(MambaSpec(block_size=16, mode="align"), id="mamba-align"),
    pytest.param(UniformSpec(members={"a": MambaSpec(block_size=16)}), id="uniform-mamba"),
]
REPLICATED: list[Any] = [
    pytest.param(AttentionSpec(block_size=16, sharded=False), id="attention"),
    pytest.param(SlidingWindowSpec(block_size=16, window=64), id="window"),
    pytest.param(RingSpec(block_size=16), id="ring"),
]
