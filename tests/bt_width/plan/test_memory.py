"""What fits into a memory, beside a plain search that gives out block by block."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config

from bt_width import (
    BlockTableLayout,
    ContextParallel,
    InvalidSpecError,
    ServingLimits,
    read_model,
)
from bt_width.plan.memory import Capacity, fit, longest_that_fits, stage_bytes
from bt_width.plan.planned import PlannedGroup

pytestmark = pytest.mark.fast

GIB = 2**30
GEMMA: Config = {
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "head_dim": 256,
    "hidden_size": 2560,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
CONFIGS = [
    pytest.param(model_configs.glm_5_2(), id="glm"),
    pytest.param(model_configs.nemotron_h_8b(), id="nemotron"),
    pytest.param(model_configs.mamba2(), id="mamba2"),
    pytest.param(GEMMA, id="gemma"),
]


def planned(
    config: Config, *, max_model_len: int = 8192, dcp: int = 1, seqs: int = 10**6, **options: Any
) -> tuple[PlannedGroup, ...]:
    """A model's planned groups."""
    limits = ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=seqs,
        max_num_batched_tokens=512,
        context_parallel=ContextParallel(size=dcp),
    )
    return tuple(
        PlannedGroup(name=group.name, layout=BlockTableLayout.plan(group.spec, limits), group=group)
        for group in read_model(config).groups(**options)
    )


def total_bytes(capacity: Capacity) -> int:
    """Bytes of all pools, on the stage that holds most of each group."""
    return sum(pool.num_blocks * pool.block_bytes for pool in capacity.pools)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("at_len", [1, 1000, 8192])
def test_the_pools_fill_the_memory_and_no_more(config: Config, at_len: int) -> None:
    groups = planned(config)
    capacity = fit(groups, 40 * GIB, at_len=at_len, pp=1)

    one_more = sum(pool.block_bytes for pool in capacity.pools)
    assert 40 * GIB - one_more < total_bytes(capacity) <= 40 * GIB


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("at_len", [1, 1000, 8192])
def test_requests_are_as_many_as_blocks_given_out_one_request_at_a_time(
    config: Config, at_len: int
) -> None:
    groups = planned(config)
    capacity = fit(groups, 7 * GIB, at_len=at_len, pp=1)

    pools = capacity.pools
    free = [pool.num_blocks - pool.headroom for pool in pools]
    served = 0
    while all(have >= pool.blocks_per_request for have, pool in zip(free, pools, strict=True)):
        free = [have - pool.blocks_per_request for have, pool in zip(free, pools, strict=True)]
        served += 1
    assert capacity.num_requests == served
    # what is left is less than a request in every group
    assert all(have <= pool.blocks_per_request for have, pool in zip(free, pools, strict=True))


@pytest.mark.parametrize("config", CONFIGS)
def test_the_longest_request_fits_and_one_token_more_does_not(config: Config) -> None:
    groups = planned(config, max_model_len=2**20)
    memory = GIB // 2

    longest = longest_that_fits(groups, memory, 1)

    assert fit(groups, memory, at_len=longest, pp=1).num_requests >= 1
    if longest < 2**20:
        assert fit(groups, memory, at_len=longest + 1, pp=1).num_requests == 0


def test_a_known_answer() -> None:
    """GLM-5.2 on 80 GiB: a block of 64 tokens takes 5,928,192 bytes."""
    (pool,) = fit(planned(model_configs.glm_5_2()), 80 * GIB, at_len=None, pp=1).pools

    assert pool.num_blocks == 1 + (80 * GIB - 5_928_192) // 5_928_192 == 14_489


def test_a_window_holds_what_a_decoding_request_sees_and_a_steps_prompts_once() -> None:
    """A window of 1,024 reaches into 17 blocks of 64; 512 prompt tokens take 8 blocks more."""
    full, window = fit(planned(GEMMA), 80 * GIB, at_len=8192, pp=1).pools

    assert (full.blocks_per_request, full.headroom) == (128, 1)
    assert (window.blocks_per_request, window.headroom) == (17, 1 + 8)


def test_a_request_shorter_than_its_window_takes_its_own_blocks() -> None:
    _, window = fit(planned(GEMMA), 80 * GIB, at_len=100, pp=1).pools

    assert window.blocks_per_request == 2


def test_context_parallel_ranks_share_the_tokens_of_a_request() -> None:
    one = fit(planned(model_configs.glm_5_2()), 80 * GIB, at_len=8192, pp=1)
    two = fit(planned(model_configs.glm_5_2(), dcp=2), 80 * GIB, at_len=8192, pp=1)

    assert two.pools[0].blocks_per_request * 2 == one.pools[0].blocks_per_request
    assert two.num_requests in (2 * one.num_requests, 2 * one.num_requests + 1)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
def test_stages_share_the_layers_and_the_heaviest_decides(config: Config, pp: int) -> None:
    groups = planned(config)
    capacity = fit(groups, 20 * GIB, at_len=4096, pp=pp)

    for stage in range(pp):
        used = sum(
            pool.num_blocks * stage_bytes(group.group, pp)[stage]
            for pool, group in zip(capacity.pools, groups, strict=True)
            if group.group is not None
        )
        assert used <= 20 * GIB
    for group in groups:
        assert group.group is not None
        assert sum(stage_bytes(group.group, pp)) == group.group.block_bytes


def test_draft_layers_lie_on_the_last_stage() -> None:
    config = {**model_configs.deepseek_v3(), "num_nextn_predict_layers": 1}
    (group,) = read_model(config).groups(num_speculative_tokens=1)

    first, second = stage_bytes(group, 2)
    assert (first, second) == (31 * 64 * 1152, 31 * 64 * 1152)


def test_what_limits_is_said() -> None:
    few = fit(planned(model_configs.glm_5_2(), seqs=4), 80 * GIB, at_len=1024, pp=1)
    many = fit(planned(model_configs.nemotron_h_8b()), 80 * GIB, at_len=8192, pp=1)

    assert few.num_requests == 4
    assert few.limited_by.startswith("--max-num-seqs 4: the memory holds ")
    # 128 MiB of keys and values, and 97.4 of states
    assert "takes 225.41 MiB, 57 % of it in group attention" in many.limited_by
    alone = fit(planned(model_configs.glm_5_2()), 80 * GIB, at_len=1024, pp=1)
    assert ", 100 % of it in group " in alone.limited_by


@pytest.mark.parametrize(
    ("memory", "at_len", "pp", "words"),
    [
        (1, None, 1, "--memory 1 bytes holds no request"),
        (80 * GIB, 8193, 1, "--at-len 8193"),
        (80 * GIB, None, 0, "--pp"),
        (80 * GIB, None, 79, "--pp must be in 1..78"),
    ],
)
def test_what_cannot_be_is_refused(memory: int, at_len: int | None, pp: int, words: str) -> None:
    with pytest.raises(InvalidSpecError, match=words.replace(".", r"\.")):
        fit(planned(model_configs.glm_5_2()), memory, at_len=at_len, pp=pp)


def test_the_least_memory_is_told_and_holds_one_token() -> None:
    groups = planned(model_configs.glm_5_2(), block_size=1)
    with pytest.raises(InvalidSpecError) as refused:
        fit(groups, 1, at_len=None, pp=1)
    least = refused.value.details["needed"]

    # the null block and the token's
    assert groups[0].group is not None
    assert least == 2 * groups[0].group.block_bytes
    assert longest_that_fits(groups, least, 1) == 1
    with pytest.raises(InvalidSpecError, match="holds no request"):
        longest_that_fits(groups, least - 1, 1)


def test_more_memory_never_holds_less() -> None:
    groups = planned(GEMMA, max_model_len=2**17)
    capacities = [fit(groups, gib * GIB, at_len=2**15, pp=1) for gib in (2, 4, 8, 16, 80)]

    for less, more in itertools.pairwise(capacities):
        assert less.num_requests <= more.num_requests
        assert less.longest <= more.longest
