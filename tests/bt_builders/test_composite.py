"""A composite asks if a part asks, and hands the width to that part alone."""

import pytest
from tests.support.batches import Request, make_batch
from tests.support.plans import plan

from bt_builders import (
    BuilderClass,
    DSAIndexerMetadata,
    DSAIndexerMetadataBuilder,
    MLAMetadata,
    MLAMetadataBuilder,
    compose_builders,
    create_metadata_builders,
)
from bt_width import AttentionSpec, InvalidSpecError

pytestmark = pytest.mark.fast

LAYOUT = plan(AttentionSpec(block_size=16), 200)


@pytest.mark.parametrize(
    ("parts", "asks"),
    [
        ([MLAMetadataBuilder, DSAIndexerMetadataBuilder], True),
        ([MLAMetadataBuilder, MLAMetadataBuilder], False),
        ([compose_builders(DSAIndexerMetadataBuilder), MLAMetadataBuilder], True),
    ],
    ids=["one-asks", "none-asks", "a-composite-asks"],
)
def test_a_composite_asks_if_a_part_asks(parts: list[BuilderClass], asks: bool) -> None:
    composite = compose_builders(*parts)

    ((builder,),) = create_metadata_builders(LAYOUT, [composite], "cpu")

    assert getattr(composite, "requires_block_table_width") is asks  # noqa: B009
    assert getattr(builder, "layout") is LAYOUT  # noqa: B009


def test_parts_build_from_one_batch() -> None:
    composite = compose_builders(MLAMetadataBuilder, DSAIndexerMetadataBuilder)
    ((builder,),) = create_metadata_builders(LAYOUT, [composite], "cpu")

    built = builder.build(make_batch(LAYOUT, [Request(40, 1)]))

    assert isinstance(built, tuple)
    mla, dsa = built

    assert isinstance(mla, MLAMetadata)
    assert isinstance(dsa, DSAIndexerMetadata)
    assert mla.decode.seq_lens.tolist() == dsa.decode.seq_lens.flatten().tolist() == [40]


def test_a_composite_takes_no_other_width() -> None:
    composite = compose_builders(DSAIndexerMetadataBuilder)
    wrong = plan(AttentionSpec(block_size=16), 300).width

    with pytest.raises(InvalidSpecError, match="is not the layout's"):
        composite(LAYOUT, "cpu", block_table_width=wrong)  # type: ignore[call-arg, arg-type]  # made at run time


def test_its_support_is_the_least_of_its_parts() -> None:
    composite = compose_builders(MLAMetadataBuilder)

    assert getattr(composite, "cudagraph_support") == "uniform"  # noqa: B009


def test_nothing_composes_to_nothing() -> None:
    with pytest.raises(InvalidSpecError, match="at least one part"):
        compose_builders()
