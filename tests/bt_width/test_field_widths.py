"""Widths that crashed or hung an engine of the field, from the length limit on."""

import pytest
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, plan_ranks

from bt_width import (
    AttentionSpec,
    CacheSpec,
    MambaSpec,
    UniformSpec,
    get_block_table_width,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "kernel_block_size", "size", "num_blocks", "width"),
    [
        pytest.param(9416, 32, 32, 1, 295, 296, id="9416-block-32"),
        pytest.param(230000, 64, 64, 1, 3594, 3594, id="230000"),
        pytest.param(300000, 64, 64, 1, 4688, 4688, id="300000"),
        pytest.param(325000, 64, 64, 1, 5079, 5080, id="325000"),
        pytest.param(350000, 64, 64, 1, 5469, 5470, id="350000"),
        pytest.param(1048576, 64, 64, 1, 16384, 16384, id="1048576"),
        pytest.param(1048576, 64, 64, 2, 8192, 8192, id="1048576-two-shards"),
        pytest.param(786432, 64, 64, 4, 3072, 3072, id="786432-four-shards"),
        pytest.param(262144, 640, 128, 1, 410, 2050, id="262144-block-640-split"),
        pytest.param(32768, 48, 16, 1, 683, 2064, id="32768-block-48"),
        pytest.param(32768, 528, 16, 1, 63, 2112, id="32768-block-528"),
        pytest.param(32768, 784, 16, 1, 42, 2352, id="32768-block-784"),
        pytest.param(512, 16, 16, 2, 16, 16, id="512-two-shards"),
        pytest.param(32768, 16, 16, 4, 512, 512, id="32768-four-shards"),
        pytest.param(32768, 16, 16, 2, 1024, 1024, id="32768-two-shards"),
        pytest.param(480000, 64, 64, 4, 1875, 1876, id="480000-four-shards"),
        pytest.param(131072, 48, 16, 1, 2731, 8208, id="131072-block-48"),
        pytest.param(131072, 176, 16, 1, 745, 8272, id="131072-block-176"),
        pytest.param(131072, 528, 16, 1, 249, 8448, id="131072-block-528"),
        pytest.param(262144, 544, 32, 1, 482, 8228, id="262144-block-544"),
        pytest.param(1048576, 4352, 64, 1, 241, 16388, id="1048576-block-4352"),
    ],
)
def test_width_vectors(
    max_model_len: int,
    block_size: int,
    kernel_block_size: int,
    size: int,
    num_blocks: int,
    width: int,
) -> None:
    """Widths of the field, from the length limit on."""
    layout = plan(
        AttentionSpec(block_size=block_size),
        max_model_len,
        kernel_block_size=kernel_block_size,
        size=size,
    )

    assert layout.max_num_blocks == num_blocks
    assert layout.width == width


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_the_width_is_the_one_function_of_the_blocks(spec: CacheSpec) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/50302"""
    for max_model_len in (1, 127, 128, 129, 5000):
        layout = plan(spec, max_model_len, size=2, interleave=4)
        alignment = 128 if layout.slot_mode == "block" else None

        assert layout.width == get_block_table_width(
            layout.max_num_blocks,
            layout.block_size,
            layout.kernel_block_size,
            token_alignment=alignment,
        )


def test_a_uniform_group_is_sharded_as_its_members_are() -> None:
    """The wrapper that forgot the division planned 16384 columns beside its members' 8192.

    Reported as https://github.com/vllm-project/vllm/issues/50825
    and https://github.com/vllm-project/vllm/pull/50823
    """
    mla, indexer = AttentionSpec(block_size=64), AttentionSpec(block_size=64, tokens_per_state=4)
    wrapper = UniformSpec(members={"mla": mla, "indexer": indexer})

    widths = [plan(spec, 1048576, size=2, interleave=4).width for spec in (wrapper, mla, indexer)]

    assert widths == [8192, 8192, 8192]


def test_every_rank_plans_one_width() -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/46514"""
    for size in (1, 2, 4, 8):
        for max_model_len in (1000, 1001, 786432, 786433, 1048576):
            layouts = plan_ranks(AttentionSpec(block_size=64), max_model_len, size)

            assert len({layout.width for layout in layouts}) == 1


def test_look_ahead_is_part_of_the_longest_request() -> None:
    """A verify step near the wall writes two tokens past the model's length.

    Reported as https://github.com/sgl-project/sglang/pull/19016
    and https://github.com/sgl-project/sglang/pull/19641
    and https://github.com/sgl-project/sglang/pull/29665
    and https://github.com/sgl-project/sglang/pull/35985
    """
    spec = AttentionSpec(block_size=1, token_alignment=None)

    assert plan(spec, 202752).width == 202752
    assert plan(spec, 202752, lookahead_tokens=2).width == 202754
    assert plan(spec, 202752, lookahead_tokens=2).num_blocks(202754) == 202754


def test_the_length_is_the_one_given() -> None:
    """Reported as https://github.com/NVIDIA/TensorRT-LLM/issues/19514
    and https://github.com/vllm-project/vllm/pull/30772
    """
    layout = plan(AttentionSpec(block_size=16, token_alignment=None), 1500)

    assert layout.width == 94


def test_a_recurrent_group_is_not_divided() -> None:
    """A request of 257 tokens has 17 Mamba blocks beside at most 16 attention blocks.

    Reported as https://github.com/vllm-project/vllm/pull/50287
    """
    mamba = plan(MambaSpec(block_size=16, mode="align"), 512, size=2)

    assert mamba.width == 32
    assert mamba.num_blocks(257) == 17
    assert plan(AttentionSpec(block_size=16), 512, size=2).width == 16


@pytest.mark.parametrize("size", [2, 4])
def test_a_recurrent_width_is_the_same_at_every_size(size: int) -> None:
    """Reported as https://github.com/vllm-project/vllm-ascend/pull/9724"""
    assert plan(MambaSpec(block_size=16, mode="align"), 512, size=size).width == 32


def test_each_group_counts_in_its_own_blocks() -> None:
    """No global block size: 4, the smallest of four, is not what 256 is divided by.

    Reported as https://github.com/vllm-project/vllm/issues/51163
    and https://github.com/vllm-project/vllm-ascend/issues/14479
    and https://github.com/LMCache/LMCache/issues/3571
    """
    widths = [
        plan(AttentionSpec(block_size=block_size, token_alignment=None), 4096).width
        for block_size in (256, 64, 8, 4)
    ]

    assert widths == [16, 64, 512, 1024]


def test_the_number_of_shards_is_only_ever_said() -> None:
    """Nothing of the process decides it: one plan, with and without, gives both of the field's.

    Reported as https://github.com/vllm-project/vllm/pull/29094
    and https://github.com/vllm-project/vllm-ascend/issues/12622
    and https://github.com/vllm-project/tpu-inference/pull/3344
    """
    spec = AttentionSpec(block_size=16)

    assert [plan(spec, 32768, size=size).width for size in (1, 2, 4)] == [2048, 1024, 512]
