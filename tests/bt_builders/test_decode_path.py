"""On the decode path nothing is allocated, read back or moved: a graph may hold it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from tests.support.batches import Request, make_batch
from tests.support.host_reads import HostReadError, NoHostReads
from tests.support.plans import serving_limits

from bt_builders import (
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    MambaMetadataBuilder,
    MetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
)
from bt_width import AttentionSpec, BlockTableLayout, CacheSpec, MambaSpec, RingSpec

pytestmark = pytest.mark.fast

NUM_DRAFTS = 3

Make = Callable[[BlockTableLayout, str], MetadataBuilder[object]]


def make_dsa(layout: BlockTableLayout, device: str) -> MetadataBuilder[object]:
    return DSAIndexerMetadataBuilder(layout, device, block_table_width=layout.width)


def make_native(layout: BlockTableLayout, device: str) -> MetadataBuilder[object]:
    options = DSAOptions(native_query_lens=frozenset(range(1, 2 + NUM_DRAFTS)))
    chosen = DSAIndexerMetadataBuilder.configured(options)
    return chosen(layout, device, block_table_width=layout.width)


SHARDED = AttentionSpec(block_size=16, tokens_per_state=2)
KINDS: list[tuple[CacheSpec, Make]] = [
    (SHARDED, make_dsa),
    (SHARDED, make_native),
    (AttentionSpec(block_size=16), MLAMetadataBuilder),
    (
        MambaSpec(block_size=16, mode="align", num_speculative_blocks=NUM_DRAFTS),
        MambaMetadataBuilder,
    ),
    (RingSpec(block_size=4), RingTailMetadataBuilder),
]
BUILDERS = pytest.mark.parametrize(
    ("spec", "make"), KINDS, ids=["dsa", "dsa-native", "mla", "mamba", "ring"]
)


def plan_small(spec: CacheSpec) -> BlockTableLayout:
    limits = serving_limits(
        300,
        max_num_reqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=NUM_DRAFTS,
        size=2,
        rank=1,
        interleave=8,
    )
    return BlockTableLayout.plan(spec, limits)


class Step:
    """Persistent buffers of a batch, as a runner owns them, filled anew every step."""

    def __init__(self, layout: BlockTableLayout, device: str = "cpu") -> None:
        limits = layout.limits
        full = make_batch(layout, [Request(20, 1)] * limits.max_num_reqs, num_tokens=64)
        self._buffers = full
        self.device = device
        if device != "cpu":
            self._buffers = replace(
                full,
                **{
                    name: getattr(full, name).to(device)
                    for name, value in tensors_of(full)
                    if "host" not in name and name != "is_prefilling"
                },
            )

    def fill(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Write ``common`` into the buffers; return it as leading slices of them."""
        slices = {}
        for name, tensor in tensors_of(common):
            buffer: torch.Tensor = getattr(self._buffers, name)
            slices[name] = buffer[: tensor.shape[0]]
            slices[name].copy_(tensor)
        return replace(common, **slices)  # type: ignore[arg-type]  # tensors by name


def tensors_of(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside a metadata object, by its path."""
    assert is_dataclass(value)
    for field in fields(value):
        inner = getattr(value, field.name)
        if isinstance(inner, torch.Tensor):
            yield field.name, inner
        elif is_dataclass(inner) and not isinstance(inner, BlockTableLayout):
            for name, tensor in tensors_of(inner):
                yield f"{field.name}.{name}", tensor


def decode_batch(layout: BlockTableLayout, draw: random.Random, query_len: int) -> object:
    """A batch of random size, padded to eight rows of ``query_len`` tokens."""
    requests = [
        Request(draw.randint(query_len + 1, 290), query_len)
        for _ in range(draw.randint(1, layout.limits.max_num_reqs))
    ]
    return make_batch(layout, requests, num_reqs=8, num_tokens=8 * query_len)


@pytest.mark.parametrize("query_len", [1, 1 + NUM_DRAFTS], ids=["plain", "drafts"])
@BUILDERS
def test_outputs_keep_their_addresses(spec: CacheSpec, make: Make, query_len: int) -> None:
    """Dummy, small and full batches of one padded shape: a graph sees the same tensors.

    Reported as https://github.com/vllm-project/vllm/pull/35671
    and https://github.com/vllm-project/vllm/pull/34903
    """
    layout = plan_small(spec)
    builder, step = make(layout, "cpu"), Step(layout)
    draw = random.Random(0)
    seen = set()
    for _ in range(12):
        common = decode_batch(layout, draw, query_len)
        assert isinstance(common, CommonAttentionMetadata)
        metadata = builder.build(step.fill(common))
        seen.add(
            tuple(
                (name, tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
                for name, tensor in tensors_of(metadata)
            )
        )

    assert len(seen) == 1


def no_reads_of_the_device(common: CommonAttentionMetadata) -> NoHostReads:
    """The mode in which only what lives on the host may be read there."""
    on_host = [
        tensor for name, tensor in tensors_of(common) if "host" in name or name == "is_prefilling"
    ]
    return NoHostReads(on_host, references=["bt_builders.reference"])


@pytest.mark.parametrize("query_lens", [[1, 1], [4, 4], [1, 4, 2]], ids=str)
@BUILDERS
def test_decodes_read_nothing_back(spec: CacheSpec, make: Make, query_lens: list[int]) -> None:
    layout = plan_small(spec)
    builder = make(layout, "cpu")
    common = make_batch(layout, [Request(60, query_len) for query_len in query_lens])

    with no_reads_of_the_device(common):
        builder.build(common)


@BUILDERS
def test_field_3_13_prefills_read_nothing_back(spec: CacheSpec, make: Make) -> None:
    """Chunks, contexts and scans are planned from host numbers alone."""
    layout = plan_small(spec)
    builder = make(layout, "cpu")
    prompts = [Request(90, 30, is_prefilling=True), Request(9, 9, is_prefilling=True)]
    common = make_batch(layout, [Request(60, 2), *prompts])

    with no_reads_of_the_device(common):
        builder.build(common)


def test_the_mode_sees_a_read() -> None:
    """The tests above can fail."""
    lens = torch.tensor([3, 4])

    with NoHostReads():
        for read in (int, bool, torch.nonzero, torch.Tensor.tolist, torch.Tensor.numpy):
            with pytest.raises(HostReadError):
                read(lens[:1])
        with pytest.raises(HostReadError):
            lens[lens > 3]
    with NoHostReads(on_host=[lens]):
        assert lens[1:].tolist() == [4]


@pytest.mark.parametrize("kind", ["dsa", "mla", "ring"])
def test_draft_steps_read_nothing_back(kind: str) -> None:
    builder: DSAIndexerMetadataBuilder | MLAMetadataBuilder | RingTailMetadataBuilder
    layout = plan_small(RingSpec(block_size=4) if kind == "ring" else SHARDED)
    if kind == "dsa":
        builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    elif kind == "mla":
        builder = MLAMetadataBuilder(layout, "cpu")
    else:
        builder = RingTailMetadataBuilder(layout, "cpu")
    common = make_batch(layout, [Request(60, 1), Request(299, 1)])

    with no_reads_of_the_device(common):
        started = builder.start_drafts(common.block_table, common.seq_lens)
        advanced = [builder.advance_drafts(common.block_table) for _ in range(3)]

    addresses = [
        [(name, tensor.data_ptr()) for name, tensor in tensors_of(each)]
        for each in (started, *advanced)
    ]
    assert addresses.count(addresses[0]) == 4


@pytest.mark.cuda
@pytest.mark.parametrize("query_lens", [[1] * 4, [4] * 4, [1, 4, 2, 1]], ids=str)
@BUILDERS
def test_decodes_on_cuda_equal_the_references_and_allocate_nothing(
    spec: CacheSpec, make: Make, query_lens: list[int]
) -> None:
    """After a warm-up, allocator counters stand still and nothing synchronises."""
    layout = plan_small(spec)
    draw = random.Random(sum(query_lens))
    builder, reference = make(layout, "cuda"), make(layout, "cpu")
    step = Step(layout, "cuda")
    common = make_batch(layout, [Request(draw.randint(5, 290), q) for q in query_lens])
    on_device = step.fill(common)
    builder.build(on_device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    torch.cuda.set_sync_debug_mode("error")
    try:
        metadata = builder.build(on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    expected = dict(tensors_of(reference.build(common)))
    found = dict(tensors_of(metadata))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


@pytest.mark.cuda
def test_draft_steps_are_captured_in_a_graph() -> None:
    """Replays move on from the lengths of their own step, as eager steps do."""
    layout = plan_small(SHARDED)
    builder = DSAIndexerMetadataBuilder(layout, "cuda", block_table_width=layout.width)
    reference = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    table = torch.zeros(3, layout.width, dtype=torch.int32, device="cuda")
    builder.start_drafts(table, lens)
    builder.advance_drafts(table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        builder.start_drafts(table, lens)
        builder.advance_drafts(table)
        captured = builder.advance_drafts(table)

    for seed in range(3):
        draw = random.Random(seed)
        common = make_batch(layout, [Request(draw.randint(1, 300), 1) for _ in range(3)])
        lens.copy_(common.seq_lens)
        table.copy_(common.block_table)
        graph.replay()
        reference.start_drafts(common.block_table, common.seq_lens)
        reference.advance_drafts(common.block_table)
        expected = dict(tensors_of(reference.advance_drafts(common.block_table)))

        for name, tensor in tensors_of(captured):
            assert torch.equal(tensor.cpu(), expected[name]), name
