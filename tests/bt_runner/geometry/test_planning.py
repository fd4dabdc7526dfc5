"""Known answers: bytes, blocks and columns of published models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support import model_configs
from tests.support.model_configs import Config

from bt_builders import init_attention
from bt_runner.errors import BadInputError
from bt_runner.geometry.families import read_geometry
from bt_runner.geometry.groups import CutOptions, geometry_groups
from bt_runner.geometry.planning import PlannedGroup, plan_groups
from bt_runner.models.checkpoint.fields import Fields
from bt_width import ContextParallel, InvalidSpecError, NoCommonBlockSizeError, ServingLimits

MIB = 2**20


def _plan(
    config: Config,
    options: CutOptions | None = None,
    *,
    max_model_len: int = 8192,
    num_drafts: int = 0,
    size: int = 1,
) -> tuple[PlannedGroup, ...]:
    geometry = read_geometry(Fields.of(config, "config.json"))
    limits = ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=256,
        max_num_batched_tokens=8192,
        num_speculative_tokens=num_drafts,
        context_parallel=ContextParallel(size=size),
    )
    return plan_groups(geometry_groups(geometry, options or CutOptions()), limits)


@pytest.mark.parametrize(
    ("config", "mla_bytes", "index_bytes"),
    [
        pytest.param(model_configs.glm_5_2, 89_856, 21 * 132, id="glm-5.2"),
        pytest.param(model_configs.glm_5, 89_856, 78 * 132, id="glm-5"),
        pytest.param(model_configs.deepseek_v32, 70_272, 61 * 132, id="deepseek-v3.2"),
    ],
)
def test_a_token_of_a_sparse_model_takes_its_known_bytes(
    config: Callable[[], Config], mla_bytes: int, index_bytes: int
) -> None:
    (planned,) = _plan(config())

    latent, index = planned.group.members
    assert (latent.token_bytes, index.token_bytes) == (mla_bytes, index_bytes)
    assert planned.token_bytes == mla_bytes + index_bytes
    assert planned.num_layers == latent.num_layers


def test_nemotron_keeps_4_mib_of_state_and_its_convolution_per_layer() -> None:
    attention, mamba = _plan(model_configs.nemotron_h_8b())

    (member,) = mamba.group.members
    assert (member.recurrent_bytes, member.conv_bytes) == (4 * MIB, 10_240 * 3 * 2)
    assert mamba.state_bytes == 24 * (4 * MIB + 61_440)
    assert attention.token_bytes == 4 * 4096
    assert attention.index_buffer_bytes == 0


def test_drafts_and_kept_states_multiply_a_requests_states() -> None:
    _, plain = _plan(model_configs.nemotron_h_8b())
    _, drafting = _plan(
        model_configs.nemotron_h_8b(), CutOptions(num_speculative_blocks=3), num_drafts=3
    )
    _, aligned = _plan(model_configs.nemotron_h_8b(), CutOptions(mamba_mode="align"))

    assert drafting.state_bytes == 4 * plain.state_bytes
    # the one a step reads and the one it writes
    assert aligned.state_bytes == 2 * plain.state_bytes
    assert aligned.layout.width == 128


@pytest.mark.parametrize(
    ("config", "max_model_len", "size", "width"),
    [
        pytest.param(model_configs.deepseek_v32, 163_840, 1, 2560, id="deepseek-v3.2"),
        pytest.param(model_configs.glm_5, 202_752, 1, 3168, id="glm-5"),
        pytest.param(model_configs.glm_5_2, 1_048_576, 1, 16_384, id="glm-5.2"),
        pytest.param(model_configs.glm_5_2, 1_048_576, 2, 8192, id="A7"),
        pytest.param(model_configs.glm_5_2, 325_000, 1, 5080, id="A2-325000"),
        pytest.param(model_configs.glm_5_2, 350_000, 1, 5470, id="A2-350000"),
    ],
)
def test_rows_are_as_wide_as_known(
    config: Callable[[], Config], max_model_len: int, size: int, width: int
) -> None:
    (planned,) = _plan(config(), max_model_len=max_model_len, size=size)

    assert planned.layout.width == width


def test_the_index_buffer_holds_a_row_for_each_decode_token() -> None:
    (planned,) = _plan(model_configs.glm_5_2(), max_model_len=350_000, num_drafts=3)

    assert planned.index_buffer_bytes == 256 * 4 * 5470 * 4


def test_the_plan_is_what_the_builders_are_made_for() -> None:
    planned = _plan(model_configs.falcon_h1(), CutOptions(kernel_block_size=32), max_model_len=4096)

    setup = init_attention(
        [each.group.attention for each in planned], planned[0].layout.limits, "cpu"
    )

    assert setup.layouts == tuple(each.layout for each in planned)


def test_a_block_is_split_where_the_kernels_take_a_smaller_one() -> None:
    (planned,) = _plan(model_configs.glm_5_2(), CutOptions(block_size=128, kernel_block_size=64))

    assert planned.layout.kernel_blocks_per_block == 2


def test_a_block_that_no_kernel_divides_is_refused() -> None:
    with pytest.raises(NoCommonBlockSizeError, match="'mla'"):
        _plan(model_configs.glm_5_2(), CutOptions(block_size=96, kernel_block_size=64))


def test_the_cache_may_have_another_dtype_than_the_model() -> None:
    (planned,) = _plan(model_configs.glm_5_2(), CutOptions(cache_dtype="float32"))

    # index keys stay 8-bit
    assert planned.token_bytes == 2 * 89_856 + 21 * 132


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        pytest.param(None, "--cache-dtype", id="not-stated"),
        pytest.param("int3", "int3", id="of-unknown-size"),
    ],
)
def test_a_dtype_without_a_size_is_named(dtype: str | None, words: str) -> None:
    with pytest.raises(BadInputError, match=words):
        _plan({**model_configs.glm_5_2(), "dtype": dtype})


def test_a_mamba_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="block_size"):
        _plan(model_configs.nemotron_h_8b(), CutOptions(mamba_block_size=0))
