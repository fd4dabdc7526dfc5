"""A batch that is not the plan's is refused before anything is launched."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plain_builders import int32
from tests.support.plans import plan, serving_limits
from tests.support.poison import POISON

from bt_builders import (
    BatchGuard,
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
)
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    InvalidEditError,
    InvalidSpecError,
    MambaSpec,
    RowOverflowError,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast

Spoil = Callable[[CommonAttentionMetadata], CommonAttentionMetadata]


def spoil_table(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    return lambda common: replace(common, block_table=change(common.block_table))


def overlapping(table: torch.Tensor) -> torch.Tensor:
    return table.new_zeros(table.numel()).as_strided(table.shape, (1, 1))


SPOILED_TABLES = [
    pytest.param(spoil_table(lambda t: t[:, :-1]), "shape", id="one-column-less"),
    pytest.param(spoil_table(lambda t: torch.cat([t, t[:, :1]], 1)), "shape", id="one-column-more"),
    pytest.param(spoil_table(lambda t: torch.cat([t, t[:1]])), "shape", id="one-row-more"),
    pytest.param(spoil_table(lambda t: t[:1]), "shape", id="one-row-less"),
    pytest.param(spoil_table(lambda t: t.long()), "dtype", id="wrong-dtype"),
    pytest.param(spoil_table(lambda t: t.t().contiguous().t()), "stride", id="transposed"),
    pytest.param(spoil_table(overlapping), "stride", id="rows-that-overlap"),
    pytest.param(spoil_table(lambda t: t.to("meta")), "device", id="elsewhere"),
]


@pytest.mark.parametrize(("spoil", "attribute"), SPOILED_TABLES)
def test_a_wrong_table_is_refused_and_buffers_stay(spoil: Spoil, attribute: str) -> None:
    """The message holds what is wrong, the numbers, and how the planned shape came about."""
    layout = plan(AttentionSpec(block_size=16, tokens_per_state=2), 200)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    common = make_batch(layout, [Request(40, 1), Request(20, 1)])
    buffers = [*builder._lens.buffers, *builder._rows.buffers, builder._slots]
    for buffer in buffers:
        buffer.fill_(POISON)

    with pytest.raises(WidthMismatchError, match=attribute) as caught:
        builder.build(spoil(common))

    assert layout.explain() in str(caught.value)
    assert caught.value.details["name"] == "block_table"
    assert all((buffer == POISON).all() for buffer in buffers)


@pytest.mark.parametrize("spoil", [case.values[0] for case in SPOILED_TABLES])
@pytest.mark.parametrize("kind", ["mla", "mamba"])
def test_every_builder_checks_its_table(kind: str, spoil: Spoil) -> None:
    builder: MLAMetadataBuilder | MambaMetadataBuilder
    if kind == "mla":
        layout = plan(AttentionSpec(block_size=16), 200)
        builder = MLAMetadataBuilder(layout, "cpu")
    else:
        layout = plan(MambaSpec(block_size=16, mode="align"), 200)
        builder = MambaMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(40, 1), Request(20, 1)])

    with pytest.raises(WidthMismatchError, match="block_table"):
        builder.build(spoil(common))


def test_an_equal_plan_is_the_builders_own() -> None:
    """Ranks and processes plan for themselves: what counts is what was planned."""
    spec = AttentionSpec(block_size=16)
    common = make_batch(plan(spec, 200), [Request(40, 2)])

    BatchGuard(plan(spec, 200), "cpu").check(common)

    with pytest.raises(WidthMismatchError, match="planned differently"):
        BatchGuard(plan(spec, 201), "cpu").check(common)


VECTORS = [
    "query_start_loc", "query_start_loc_host", "seq_lens", "seq_lens_upper_bound_host",
    "local_seq_lens", "num_computed_tokens", "num_accepted_tokens", "is_prefilling",
    "positions", "slot_mapping",
]  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_every_vector_is_checked(name: str) -> None:
    """Too long, too short, of another dtype, strided, expanded, or no tensor at all."""
    layout = plan(AttentionSpec(block_size=16), 200)
    guard = BatchGuard(layout, "cpu")
    common = make_batch(layout, [Request(40, 2), Request(20, 2)])
    guard.check(common)
    vector: torch.Tensor = getattr(common, name)

    for wrong in (
        vector[:-1],
        torch.cat([vector, vector[:1]]),
        vector.to(torch.int16),
        torch.stack([vector, vector], dim=1)[:, 0],
        vector[:1].expand(len(vector)),
        vector.view(1, -1),
        vector.tolist(),
    ):
        with pytest.raises(WidthMismatchError, match=name):
            guard.check(replace(common, **{name: wrong}))  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("counts", "name"),
    [
        ({"num_reqs": 5}, "num_reqs must be an int in 0..4"),
        ({"num_tokens": 65}, "num_tokens must be an int in 0..64"),
        ({"max_query_len": 65}, "max_query_len must be an int in 0..64"),
        ({"num_reqs": -1}, "not -1"),
        ({"num_tokens": 4.0}, "not 4.0"),
    ],
    ids=["rows", "tokens", "query", "negative", "float"],
)
def test_more_than_the_limits_is_refused(counts: dict[str, object], name: str) -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(40, 2), Request(20, 2)])

    with pytest.raises(InvalidEditError, match=name):
        BatchGuard(layout, "cpu").check(replace(common, **counts))  # type: ignore[arg-type]  # counts by name


def test_field_3_2_more_rows_than_planned_never_grow_a_buffer() -> None:
    """Engines resized their table behind the graph's back and lost the rows."""
    layout = plan(AttentionSpec(block_size=16), 200)
    builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    roomy = BlockTableLayout.plan(layout.spec, serving_limits(200, max_num_reqs=8))
    address = builder._rows.buffers.table.data_ptr()
    common = make_batch(roomy, [Request(20, 1)] * 5)

    with pytest.raises(InvalidEditError, match="not 5"):
        builder.build(replace(common, layout=layout))

    assert builder._rows.buffers.table.data_ptr() == address


def test_field_3_1_a_batch_of_another_plan_is_refused_with_both_derivations() -> None:
    """Two lengths, two widths: not compared, and a kernel read across rows."""
    spec = AttentionSpec(block_size=16)
    ours, theirs = plan(spec, 448), plan(spec, 1500)
    builder = MLAMetadataBuilder(ours, "cpu")

    with pytest.raises(WidthMismatchError, match="planned differently") as caught:
        builder.build(make_batch(theirs, [Request(40, 1)]))

    assert ours.explain() in str(caught.value)
    assert theirs.explain() in str(caught.value)


def test_field_3_1_a_shorter_plan_of_equal_width_is_another_plan() -> None:
    """A length that was lowered after tables existed is seen even where widths agree."""
    spec = AttentionSpec(block_size=16)
    ours, theirs = plan(spec, 250), plan(spec, 251)
    assert ours.width == theirs.width

    with pytest.raises(WidthMismatchError, match="planned differently"):
        BatchGuard(ours, "cpu").check(make_batch(theirs, [Request(40, 1)]))


def test_a_request_longer_than_a_row_is_refused() -> None:
    """What was planned for drafts past the longest request is no overflow."""
    layout = plan(AttentionSpec(block_size=16), 200, lookahead_tokens=3)
    guard = BatchGuard(layout, "cpu")
    common = make_batch(layout, [Request(203, 2)])

    guard.check(common)
    with pytest.raises(RowOverflowError, match="not 204"):
        guard.check(replace(common, max_seq_len=204))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"query_start_loc_host": [0, 3, 2]}, "must ascend"),
        ({"query_start_loc_host": [1, 2, 4]}, "must ascend"),
        ({"query_start_loc_host": [0, 2, 5]}, "must ascend"),
        ({"seq_lens_upper_bound_host": [40, 1]}, "more tokens in this step"),
        ({"seq_lens_upper_bound_host": [40, 41]}, "max_seq_len is 40"),
        ({"query_start_loc_host": [0, 1, 4]}, "max_query_len is 2"),
    ],
    ids=["back", "not-from-0", "past-the-tokens", "short-bound", "loose-bound", "long-query"],
)
def test_host_numbers_that_contradict_each_other_are_refused(
    changes: dict[str, list[int]], word: str
) -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(40, 2), Request(20, 2)])
    tensors = {name: int32(values) for name, values in changes.items()}

    with pytest.raises(InvalidEditError, match=word):
        BatchGuard(layout, "cpu").check(replace(common, **tensors))  # type: ignore[arg-type]  # tensors by name


def test_something_that_is_no_batch_is_refused() -> None:
    layout = plan(AttentionSpec(block_size=16), 200)
    common = make_batch(layout, [Request(40, 2)])
    wrong: list[Any] = [None, "batch", replace(common, layout=None)]  # type: ignore[arg-type]  # the fault under test

    for each in wrong:
        with pytest.raises(InvalidSpecError):
            BatchGuard(layout, "cpu").check(each)


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", None, 3.5], ids=str)
def test_a_device_that_is_not_there_is_refused(device: Any) -> None:
    with pytest.raises(InvalidSpecError, match="device"):
        BatchGuard(plan(AttentionSpec(block_size=16), 200), device)
