"""After memory was lost and mapped again, a setup's ``rebind`` makes its builders whole."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.plans import serving_limits

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    AttentionSetup,
    BuilderClass,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
    compose_builders,
    init_attention,
)
from bt_builders.drafts import SlotBuilder
from bt_width import AttentionSpec, CacheSpec, MambaSpec, MultipleOf, RingSpec

pytestmark = pytest.mark.fast

FLAT = DSAIndexerMetadataBuilder.configured(DSAOptions(native_query_lens=frozenset({1})))
BATCHES = [
    [Request(40, 2), Request(9, 2)],
    [Request(40, 3), Request(9, 1), Request(30, 20, is_prefilling=True)],
    [Request(33, 1)],
]


def init(num_ubatches: int = 2) -> AttentionSetup:
    kinds: list[tuple[CacheSpec, list[BuilderClass]]] = [
        (AttentionSpec(block_size=16, tokens_per_state=2), [FLAT]),
        (AttentionSpec(block_size=16), [MLAMetadataBuilder, compose_builders(FLAT)]),
        (
            MambaSpec(block_size=16, mode="align", num_speculative_blocks=2),
            [MambaMetadataBuilder],
        ),
        (RingSpec(block_size=4), [RingTailMetadataBuilder]),
    ]
    groups = [
        AttentionGroup(
            name=f"group {place}",
            spec=spec,
            backends=tuple(
                AttentionBackend(
                    name=str(which),
                    builder_class=each,
                    supported_kernel_block_sizes=[MultipleOf(1)],
                )
                for which, each in enumerate(classes)
            ),
        )
        for place, (spec, classes) in enumerate(kinds)
    ]
    limits = serving_limits(64, max_num_reqs=4, max_num_batched_tokens=32, num_speculative_tokens=2)
    return init_attention(groups, limits, "cpu", num_ubatches=num_ubatches)


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors_of(each)]
    if type(value).__module__.startswith("bt_builders"):
        return tensors_of(list(vars(value).values()))
    return []


def build_all(setup: AttentionSetup) -> list[tuple[int, list[object]]]:
    """Addresses and values of what every builder builds, draft steps included."""
    found = []
    for group in setup.groups:
        for ubatch in range(2):
            for builder in group.builders_of(ubatch):
                for requests in BATCHES:
                    common = make_batch(group.layout, requests)
                    built = [builder.build(common)]
                    if isinstance(builder, SlotBuilder):
                        built += [
                            builder.start_drafts(common.block_table, common.seq_lens),
                            builder.advance_drafts(common.block_table),
                        ]
                    if isinstance(builder, MambaMetadataBuilder):
                        counts = torch.ones(len(requests), dtype=torch.int32)
                        built.append(builder.commit_states(common, counts))
                    mine = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(builder)}
                    for tensor in tensors_of(built):
                        storage = tensor.untyped_storage().data_ptr()
                        # what a build allocates lies anywhere
                        address = tensor.data_ptr() if storage in mine else 0
                        found.append((address, tensor.tolist()))
    return found


def test_rebind_makes_every_builder_whole_at_the_same_addresses() -> None:
    setup = init()
    expected = build_all(setup)
    for group in setup.groups:
        for ubatch in range(2):
            for tensor in tensors_of(list(group.builders_of(ubatch))):
                tensor.view(-1).view(torch.uint8).fill_(1 if tensor.dtype == torch.bool else 0x7F)

    setup.rebind()

    assert build_all(setup) == expected


def test_without_rebind_lost_memory_shows() -> None:
    """The test above can fail."""
    setup = init()
    expected = build_all(setup)
    mla = setup.groups[1].builder(MLAMetadataBuilder)
    mla._draft_starts.fill_(0x7F7F7F7F)

    assert build_all(setup) != expected


def test_rows_that_memory_filled_behind_their_counts_are_null_again() -> None:
    """Counts came back as 0 and ids did not: the next step would clear nothing."""
    setup = init()
    expected = build_all(setup)
    for ubatch in range(2):
        builder = setup.groups[0].builder(FLAT, ubatch=ubatch)
        builder._rows.buffers.table.fill_(0x7F7F7F7F)
        builder._rows.buffers.num_live.zero_()

    setup.rebind()

    assert build_all(setup) == expected
