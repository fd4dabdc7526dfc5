"""The indexer's builder: what it is given, what it refuses, and whose slots it passes on."""

import pytest
from tests.support.batches import Request, make_batch, rows_of
from tests.support.plain_builders import tokens_of
from tests.support.plans import plan, plan_ranks

from bt_builders import DSAIndexerMetadataBuilder, DSAOptions
from bt_width import (
    PAD_SLOT,
    AttentionSpec,
    BlockTableLayout,
    BlockTableWidth,
    InvalidSpecError,
    MambaSpec,
    RingSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast


def make_builder(layout: BlockTableLayout) -> DSAIndexerMetadataBuilder:
    return DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)


@pytest.mark.parametrize("off_by", [-1, 1, 128])
def test_a_width_that_is_not_the_layouts_is_refused_at_once(off_by: int) -> None:
    """The failure is in the constructor, whatever batches come: none is needed to see it.

    Reported as https://github.com/vllm-project/vllm/issues/44827
    """
    layout = plan(AttentionSpec(block_size=16), 200)

    with pytest.raises(WidthMismatchError, match="is not the layout's") as caught:
        DSAIndexerMetadataBuilder(
            layout, "cpu", block_table_width=BlockTableWidth(layout.width + off_by)
        )

    assert caught.value.details["block_table_width"] == layout.width + off_by
    assert layout.explain() in str(caught.value)


@pytest.mark.parametrize("spec", [MambaSpec(block_size=16), RingSpec(block_size=16)], ids=str)
def test_a_group_that_keeps_no_token_is_refused(spec: MambaSpec | RingSpec) -> None:
    with pytest.raises(InvalidSpecError, match="every token's key"):
        make_builder(plan(spec, 200))


@pytest.mark.parametrize("max_model_len", [230_000, 300_000, 325_000, 350_000])
def test_the_builders_width_is_the_tables(max_model_len: int) -> None:
    """Odd block counts: an aligned table and an unaligned buffer differed by one column.

    Reported as https://github.com/vllm-project/vllm/issues/46074
    """
    layout = plan(AttentionSpec(block_size=64), max_model_len)
    builder = make_builder(layout)

    metadata = builder.build(make_batch(layout, [Request(130, 2), Request(70, 1)]))

    assert metadata.decode.block_table.shape[1] == layout.width
    assert layout.width % 2 == 0


def test_without_compression_slots_are_the_tables_own_tensor() -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(40, 2)])

    assert make_builder(layout).build(common).slot_mapping is common.slot_mapping


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("rank", range(2))
def test_only_the_token_that_completes_a_state_writes(ratio: int, rank: int) -> None:
    """Every other token, padding and another rank's tokens have no slot."""
    layout = plan_ranks(AttentionSpec(block_size=16, tokens_per_state=ratio), 200, 2, interleave=8)[
        rank
    ]
    requests = [Request(40, 24), Request(9, 9)]
    common = make_batch(layout, requests, num_tokens=40)

    slots = make_builder(layout).build(common).slot_mapping.tolist()

    rows = rows_of(layout, requests)
    for token, (owner, position) in enumerate(tokens_of(requests)):
        slot = layout.slot(position, rows[owner])
        completes = slot != PAD_SLOT and (position + 1) % ratio == 0
        assert slots[token] == (slot // ratio if completes else PAD_SLOT)
    assert slots[33:] == [PAD_SLOT] * 7


def test_slots_of_a_longer_step_leave_nothing_behind() -> None:
    layout = plan(AttentionSpec(block_size=16, tokens_per_state=4), 200)
    builder = make_builder(layout)
    builder.build(make_batch(layout, [Request(60, 60)]))

    slots = builder.build(make_batch(layout, [Request(3, 3)], num_tokens=60)).slot_mapping

    assert slots.tolist() == [PAD_SLOT] * 60


def test_options_make_a_class_of_their_own() -> None:
    """A builder's options cannot be changed from outside."""
    options = DSAOptions(workspace_tokens=1024)

    chosen = DSAIndexerMetadataBuilder.configured(options)

    assert chosen.options is options
    assert DSAIndexerMetadataBuilder.options == DSAOptions()
    assert chosen.requires_block_table_width
