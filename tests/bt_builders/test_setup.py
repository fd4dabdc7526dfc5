"""Agree, plan, build, in that order: one layout object for a group's table and builders."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plans import serving_limits

from bt_builders import (
    CUTLASS_MLA,
    FLASHINFER_MLA,
    FLASHMLA_DENSE_BATCH_INVARIANT,
    KERNEL_RULES,
    AttentionBackend,
    AttentionGroup,
    BuilderClass,
    DSAIndexerMetadataBuilder,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
    compose_builders,
    init_attention,
    prepare_kernel_block_sizes,
)
from bt_tables import MultiGroupBlockTable
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    InvalidSpecError,
    MambaSpec,
    MultipleOf,
    NoCommonBlockSizeError,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
    WidthMismatchError,
)

pytestmark = pytest.mark.fast


def backend(
    name: str,
    sizes: list[int | MultipleOf],
    *,
    builder_class: BuilderClass = MLAMetadataBuilder,
    span: int | None = None,
) -> AttentionBackend:
    return AttentionBackend(
        name=name, builder_class=builder_class, supported_kernel_block_sizes=sizes, span=span
    )


def group(spec: CacheSpec, *backends: AttentionBackend) -> AttentionGroup:
    return AttentionGroup(name="group", spec=spec, backends=backends)


def test_all_backends_of_a_group_agree() -> None:
    """[32, 64] and [64] is 64, not the first backend's first size.

    Reported as https://github.com/vllm-project/vllm/issues/48286
    and https://github.com/vllm-project/vllm/pull/49845
    and https://github.com/vllm-project/vllm/issues/42510
    and https://github.com/vllm-project/vllm/issues/41339
    """
    both = group(AttentionSpec(block_size=128), backend("a", [32, 64]), backend("b", [64]))

    assert prepare_kernel_block_sizes([both]) == (64,)


def test_no_common_size_names_group_backends_and_a_way_out() -> None:
    """Reported as https://github.com/vllm-project/vllm/issues/48286
    and https://github.com/vllm-project/vllm/pull/49845
    and https://github.com/vllm-project/vllm/issues/42510
    and https://github.com/vllm-project/vllm/issues/41339
    """
    with pytest.raises(NoCommonBlockSizeError, match="group 'group'") as caught:
        prepare_kernel_block_sizes([group(AttentionSpec(block_size=16), backend("b", [64]))])

    assert "b takes 64" in str(caught.value)
    assert caught.value.details["nearest"] == 64


@pytest.mark.parametrize("spec", [MambaSpec(block_size=48), RingSpec(block_size=4)], ids=str)
def test_recurrent_and_ring_groups_are_never_split(spec: CacheSpec) -> None:
    assert prepare_kernel_block_sizes([group(spec, backend("b", [16]))]) == (
        4 if isinstance(spec, RingSpec) else 48,
    )


def test_one_size_a_group_at_the_groups_own_place() -> None:
    groups = [
        group(AttentionSpec(block_size=96), backend("a", [32])),
        group(MambaSpec(block_size=7), backend("m", [16], builder_class=MambaMetadataBuilder)),
        group(AttentionSpec(block_size=64), backend("b", [MultipleOf(16)])),
    ]

    assert prepare_kernel_block_sizes(groups) == (32, 7, 64)


def test_every_group_keeps_its_own_block() -> None:
    """Blocks of 256, 64, 8 and 4: each keeps its own, whichever is smallest.

    Reported as https://github.com/vllm-project/vllm/issues/51163
    and https://github.com/vllm-project/vllm-ascend/issues/14479
    and https://github.com/LMCache/LMCache/issues/3571
    """
    sizes = (256, 64, 8, 4)
    groups = [group(AttentionSpec(block_size=size), backend("a", [size])) for size in sizes]

    setup = init_attention(groups, serving_limits(1000), "cpu")

    assert tuple(layout.block_size for layout in setup.layouts) == sizes
    assert [layout.width for layout in setup.layouts] == [4, 16, 128, 256]


def test_a_spec_without_an_alignment_takes_its_backends() -> None:
    spec = AttentionSpec(block_size=5, token_alignment=None)

    (layout,) = init_attention(
        [group(spec, backend("a", [5], span=15))], serving_limits(21), "cpu"
    ).layouts

    assert layout.spec == AttentionSpec(block_size=5, token_alignment=15)
    assert layout.width == 6


def test_the_alignment_is_what_spec_and_backends_need_together() -> None:
    spec = AttentionSpec(block_size=32, token_alignment=48)
    both = group(spec, backend("a", [32], span=64), backend("b", [32], span=96))

    (layout,) = init_attention([both], serving_limits(1000), "cpu").layouts

    assert layout.spec == replace(spec, token_alignment=192)
    assert layout.width * 32 % 192 == 0


def test_without_a_span_the_spec_stays_as_declared() -> None:
    """None stays None: a kernel that takes any width gets the natural one."""
    spec = AttentionSpec(block_size=32, token_alignment=None)

    (layout,) = init_attention(
        [group(spec, backend("a", [32]))], serving_limits(1025), "cpu"
    ).layouts

    assert layout.spec is spec
    assert layout.width == 33


def test_a_span_in_states_counts_their_tokens() -> None:
    spec = AttentionSpec(block_size=64, tokens_per_state=4, token_alignment=None)
    states = AttentionBackend(
        name="states",
        builder_class=DSAIndexerMetadataBuilder,
        supported_kernel_block_sizes=[64],
        span=48,
        span_unit="states",
    )

    (layout,) = init_attention([group(spec, states)], serving_limits(1000), "cpu").layouts

    assert layout.spec == replace(spec, token_alignment=192)


def test_every_member_of_a_shared_table_is_aligned() -> None:
    members = {
        "mla": AttentionSpec(block_size=64),
        "indexer": AttentionSpec(block_size=64, tokens_per_state=2),
    }
    both = group(UniformSpec(members=members), backend("a", [64], span=256))

    (layout,) = init_attention([both], serving_limits(1000), "cpu").layouts

    assert isinstance(layout.spec, UniformSpec)
    assert [spec.token_alignment for _, spec in layout.spec.members] == [256, 256]  # type: ignore[union-attr]  # both are AttentionSpecs


def test_a_wrapper_has_the_shards_of_its_members() -> None:
    """1,048,576 tokens on 2 ranks: 8,192 columns from the wrapper and from each member.

    Reported as https://github.com/vllm-project/vllm/issues/50825
    and https://github.com/vllm-project/vllm/pull/50823
    """
    member = AttentionSpec(block_size=64)
    limits = serving_limits(1_048_576, size=2)
    wrapped = group(UniformSpec(members={"mla": member, "indexer": member}), backend("a", [64]))

    setup = init_attention([wrapped, group(member, backend("a", [64]))], limits, "cpu")

    assert [layout.width for layout in setup.layouts] == [8192, 8192]


@pytest.mark.parametrize("spec", [MambaSpec(block_size=64), RingSpec(block_size=64)], ids=str)
def test_a_span_on_rows_that_span_no_tokens_is_refused(spec: CacheSpec) -> None:
    with pytest.raises(InvalidSpecError, match="rows span none"):
        init_attention([group(spec, backend("a", [64], span=128))], serving_limits(100), "cpu")


def test_no_builder_exists_before_every_width_is_known() -> None:
    """The last group cannot be planned: nothing was built for the first."""
    built = []

    class Counting(MLAMetadataBuilder):
        def __init__(self, layout: BlockTableLayout, device: torch.device | str) -> None:
            built.append(layout)
            super().__init__(layout, device)

    good = group(AttentionSpec(block_size=64), backend("a", [64], builder_class=Counting))
    bad = group(
        AttentionSpec(block_size=64, tokens_per_state=3), backend("a", [64], builder_class=Counting)
    )

    with pytest.raises(InvalidSpecError, match="tokens_per_state"):
        init_attention([good, bad], serving_limits(100), "cpu")

    assert built == []


def test_the_support_of_all_groups_is_the_least() -> None:
    class Never(MLAMetadataBuilder):
        cudagraph_support = "never"  # type: ignore[assignment]  # less than its parent

    groups = [
        group(AttentionSpec(block_size=64), backend("a", [64])),
        group(AttentionSpec(block_size=64), backend("b", [64], builder_class=Never)),
    ]

    setup = init_attention(groups, serving_limits(100), "cpu")

    assert setup.cudagraph_support == ("never", "Never")


def random_setup(draw: random.Random) -> tuple[list[AttentionGroup], ServingLimits]:
    """Groups of every kind with specs, splits, spans and limits that go together."""
    ratio = draw.choice([1, 1, 2, 4])
    size = draw.choice([1, 1, 2, 4])
    drafts = draw.randint(0, 4)
    limits = ServingLimits(
        max_model_len=draw.randint(1, 5000),
        max_num_reqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.randint(8, 64),
        num_speculative_tokens=drafts,
        lookahead_tokens=draw.randint(0, drafts),
        context_parallel=ContextParallel(
            size=size, rank=draw.randrange(size), interleave=draw.choice([4, 8, 16])
        ),
    )
    block_size = draw.choice([16, 48, 64, 128, 176])
    attention = AttentionSpec(
        block_size=block_size,
        sharded=draw.random() < 0.8,
        tokens_per_state=ratio,
        token_alignment=draw.choice([None, 128, 48]),
    )
    indexer = backend("indexer", [MultipleOf(16)], builder_class=DSAIndexerMetadataBuilder)
    mla = backend("mla", [16, block_size], span=draw.choice([None, 128, 96]))
    composite = backend(
        "both",
        [16],
        builder_class=compose_builders(MLAMetadataBuilder, DSAIndexerMetadataBuilder),
    )
    groups = [
        AttentionGroup(
            name="attention",
            spec=attention,
            backends=tuple(draw.sample([indexer, mla, composite], draw.randint(1, 3))),
        ),
        AttentionGroup(
            name="window",
            spec=SlidingWindowSpec(block_size=block_size, window=64),
            backends=(mla,),
        ),
        AttentionGroup(
            name="mamba",
            spec=MambaSpec(
                block_size=draw.choice([16, 544]),
                mode=draw.choice(["none", "align"]),
                num_speculative_blocks=drafts,
            ),
            backends=(backend("m", [16], builder_class=MambaMetadataBuilder),),
        ),
        AttentionGroup(
            name="ring",
            spec=RingSpec(block_size=4),
            backends=(backend("r", [16], builder_class=RingTailMetadataBuilder),),
        ),
    ]
    return draw.sample(groups, draw.randint(1, 4)), limits


@pytest.mark.parametrize("seed", range(6))
def test_tables_and_builders_hold_one_layout_object(seed: int) -> None:
    """Fifty random configurations each: whoever holds a plan holds this one."""
    draw = random.Random(seed)
    for _ in range(50):
        groups, limits = random_setup(draw)
        num_ubatches = draw.randint(1, 3)

        setup = init_attention(groups, limits, "cpu", num_ubatches=num_ubatches)
        tables = MultiGroupBlockTable(setup.layouts, device="cpu")

        for index, planned in enumerate(setup.groups):
            assert planned.name == groups[index].name
            assert tables.layouts[index] is planned.layout
            assert tables.block_table(index).shape[1] == planned.layout.width
            assert planned.builders is planned.builders_of(0)
            for ubatch in range(num_ubatches):
                for builder in planned.builders_of(ubatch):
                    assert getattr(builder, "layout") is planned.layout  # noqa: B009


@pytest.mark.parametrize("ubatch", [-1, 2, True, 0.0])
def test_a_micro_batch_out_of_range_is_refused_by_the_groups_name(ubatch: Any) -> None:
    groups, limits = random_setup(random.Random(0))
    setup = init_attention(groups, limits, "cpu", num_ubatches=2)

    with pytest.raises(InvalidSpecError, match=f"{groups[0].name!r}, not {ubatch!r}"):
        setup.groups[0].builders_of(ubatch)


@pytest.mark.parametrize("block_size", [16, 48, 64])
def test_the_indexers_table_is_as_wide_as_the_groups(block_size: int) -> None:
    """Odd and even block counts, at many lengths: one width, whatever the concurrency.

    Reported as https://github.com/vllm-project/vllm/issues/46074
    """
    draw = random.Random(block_size)
    lengths = [64 * n for n in draw.sample(range(1, 3125), 40)]
    lengths += [draw.randint(1, 200_000) for _ in range(40)]
    chosen = backend("indexer", [MultipleOf(16)], builder_class=DSAIndexerMetadataBuilder)
    for max_model_len in lengths:
        limits = serving_limits(max_model_len, max_num_reqs=draw.randint(2, 4))
        setup = init_attention([group(AttentionSpec(block_size=block_size), chosen)], limits, "cpu")
        (planned,) = setup.groups
        layout, builder = planned.layout, planned.builder(DSAIndexerMetadataBuilder)

        tables = MultiGroupBlockTable(setup.layouts, device="cpu")

        common = make_batch(layout, [Request(1, 1)], num_tokens=2)
        rows = builder.build(common).decode.block_table
        assert rows.shape[1] == tables.block_table(0).shape[1] == layout.width


@pytest.mark.parametrize("seed", range(6))
def test_builders_refuse_what_their_table_does_not_look_like(seed: int) -> None:
    """Fifty more each: a column less, a row more, another dtype, columns apart."""
    draw = random.Random(seed + 100)
    for _ in range(50):
        groups, limits = random_setup(draw)
        setup = init_attention(groups, limits, "cpu")
        for planned in setup.groups:
            layout = planned.layout
            common = make_batch(layout, [Request(min(limits.max_model_len, 40), 1)])
            table = common.block_table
            wrong = {
                "shape": [table[:, :-1], torch.cat([table, table])],
                "dtype": [table.long()],
                "stride": [torch.cat([table, table], 1)[:, ::2]] if layout.width > 1 else [],
            }
            for builder in planned.builders:
                builder.build(common)
                for attribute, tables in wrong.items():
                    for each in tables:
                        with pytest.raises(
                            WidthMismatchError, match=f"block_table has {attribute}"
                        ):
                            builder.build(replace(common, block_table=each))


@pytest.mark.parametrize("rule", KERNEL_RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("max_model_len", [9_416, 131_072])
def test_every_published_rule_is_met_by_planning(rule: object, max_model_len: int) -> None:
    """295 blocks of 32 tokens failed ``block_num % (128 / block_size)``; 296 do not.

    Reported as https://github.com/vllm-project/vllm/pull/39324
    """
    from bt_builders import KernelRule

    assert isinstance(rule, KernelRule)
    chosen = rule.backend(MLAMetadataBuilder)
    block_size = 32 if rule is FLASHINFER_MLA else 128
    wanted = group(AttentionSpec(block_size=block_size), chosen)

    (layout,) = init_attention([wanted], serving_limits(max_model_len), "cpu").layouts

    chosen.check(layout)
    if rule.span:
        assert layout.width * layout.kernel_block_size % rule.span == 0
    if rule is FLASHINFER_MLA and max_model_len == 9_416:
        assert layout.width == 296


def test_a_rule_is_checked_when_its_backend_meets_a_layout() -> None:
    """Nothing is padded in a step: a layout planned without the need is refused at once.

    Reported as https://github.com/flashinfer-ai/flashinfer/issues/3915
    """
    layout = BlockTableLayout.plan(
        AttentionSpec(block_size=32, token_alignment=None), serving_limits(1025)
    )

    with pytest.raises(InvalidSpecError, match="multiple of 128 tokens, they span 1056"):
        FLASHINFER_MLA.backend(MLAMetadataBuilder).check(layout)
    with pytest.raises(NoCommonBlockSizeError, match="cutlass-mla"):
        CUTLASS_MLA.backend(MLAMetadataBuilder).check(layout)


def test_the_batch_invariant_rule_is_64_columns() -> None:
    chosen = FLASHMLA_DENSE_BATCH_INVARIANT.backend(MLAMetadataBuilder)

    (layout,) = init_attention(
        [group(AttentionSpec(block_size=64), chosen)], serving_limits(5000), "cpu"
    ).layouts

    assert layout.width == 128


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"span": 0}, "span"),
        ({"span_unit": "bytes"}, "span_unit"),
        ({"supported_kernel_block_sizes": 16}, "must be a sequence"),
    ],
    ids=["span", "unit", "sizes"],
)
def test_a_backend_that_says_nonsense_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidSpecError, match=word):
        replace(backend("a", [16]), **changes)  # type: ignore[arg-type]  # the fault under test


def test_backends_of_a_group_have_names_of_their_own() -> None:
    with pytest.raises(InvalidSpecError, match="names of their own"):
        group(AttentionSpec(block_size=16), backend("a", [16]), backend("a", [16]))


def test_a_group_without_a_backend_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="needs a backend"):
        group(AttentionSpec(block_size=16))
