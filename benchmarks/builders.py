"""What a decode step of the builders holds, moves and costs, beside a full copy of every row.

GLM-5.2's shape: blocks of 64, 1,048,576 tokens, 256 requests, three drafts each, 8,192
batched tokens, contexts of 8,192 tokens. Equality comes first; without it there is no time.
It prints and asserts nothing else.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import torch

from bt_builders import (
    BatchGuard,
    CommonAttentionMetadata,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    local_lengths,
)
from bt_builders.mamba import cut_chunks
from bt_width import (
    NULL_BLOCK,
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    MambaSpec,
    ServingLimits,
    index_buffer_bytes,
)

NUM_REQS = 256
NUM_DRAFTS = 3
QUERY_LEN = 1 + NUM_DRAFTS
CONTEXT = 8192
LIMITS = ServingLimits(
    max_model_len=1_048_576,
    max_num_reqs=NUM_REQS,
    max_num_batched_tokens=8192,
    num_speculative_tokens=NUM_DRAFTS,
)
POISON = 2_147_480_000
MIB = 2**20


class Nothing:
    """Launches no kernel: what is left of a ``build`` is its host part."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: object) -> None:
        """Do nothing."""


def decode_batch(layout: BlockTableLayout) -> CommonAttentionMetadata:
    """A uniform decode of 256 requests, each 8,192 tokens long, in blocks of random ids."""
    starts = torch.arange(0, NUM_REQS * QUERY_LEN + 1, QUERY_LEN, dtype=torch.int32)
    lens = torch.full((NUM_REQS,), CONTEXT, dtype=torch.int32)
    table = torch.full((NUM_REQS, layout.width), NULL_BLOCK, dtype=torch.int32)
    columns = min(-(-CONTEXT // layout.kernel_block_size), layout.width)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 2**31 - 1, (NUM_REQS, columns), dtype=torch.int32, generator=draw)
    table[:, :columns] = ids
    positions = (lens.long() - QUERY_LEN).unsqueeze(1) + torch.arange(QUERY_LEN)
    return CommonAttentionMetadata(
        layout=layout,
        num_reqs=NUM_REQS,
        num_tokens=NUM_REQS * QUERY_LEN,
        max_query_len=QUERY_LEN,
        max_seq_len=CONTEXT,
        query_start_loc=starts,
        query_start_loc_host=starts.clone(),
        seq_lens=lens,
        seq_lens_upper_bound_host=lens.clone(),
        local_seq_lens=local_lengths(lens, layout),
        num_computed_tokens=lens - QUERY_LEN,
        num_accepted_tokens=torch.ones_like(lens),
        is_prefilling=torch.zeros(NUM_REQS, dtype=torch.bool),
        positions=positions.flatten(),
        block_table=table,
        slot_mapping=torch.zeros(NUM_REQS * QUERY_LEN, dtype=torch.int64),
    )


def tensors_inside(value: object, seen: set[int]) -> list[torch.Tensor]:
    """Every tensor that a builder holds, each storage once."""
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple | list):
        inner = list(value)
    elif type(value).__module__.startswith("bt_builders"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        inner = [getattr(value, name) for name in slots] or list(vars(value).values())
    else:
        return []
    return [tensor for each in inner for tensor in tensors_inside(each, seen)]


def buffer_bytes(builder: object) -> int:
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_inside(builder, set())
    }
    return sum(storages.values())


def median_us(call: Callable[[], object], runs: int) -> float:
    call()
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def processor_us(call: Callable[[], object], runs: int) -> str:
    """Best and median of rounds of a hundred calls, in processor time."""
    call()
    times = []
    for _ in range(max(runs // 10, 5)):
        begin = time.process_time()
        for _ in range(100):
            call()
        times.append((time.process_time() - begin) * 1e4)
    return f"{min(times):6.1f} us (median {statistics.median(times):.1f})"


def full_copy(common: CommonAttentionMetadata, out: torch.Tensor) -> torch.Tensor:
    """Every column of every row, as engines expand: the baseline."""
    owner = torch.arange(NUM_REQS).repeat_interleave(QUERY_LEN)
    return torch.index_select(common.block_table, 0, owner, out=out[: common.num_tokens])


def report_index_buffers(runs: int) -> None:
    layout = BlockTableLayout.plan(AttentionSpec(block_size=64), LIMITS)
    width = layout.width
    common = decode_batch(layout)
    # a kernel that takes one token a row: every row is copied
    options = DSAOptions(native_query_lens=frozenset({1}))
    chosen = DSAIndexerMetadataBuilder.configured(options)
    builder = chosen(layout, "cpu", block_table_width=width)
    held = buffer_bytes(builder)
    rows = builder._rows.buffers.table
    rows.fill_(POISON)
    decode = builder.build(common).decode
    written = int((rows != POISON).sum())
    rows.masked_fill_(rows == POISON, NULL_BLOCK)

    expected = torch.empty(LIMITS.max_num_batched_tokens, width, dtype=torch.int32)
    if not torch.equal(decode.block_table, full_copy(common, expected)):
        raise SystemExit("the expanded rows differ from a full copy: no time is told")

    num_tokens = common.num_tokens
    batch = common.query_start_loc.nbytes + common.seq_lens.nbytes
    # each token: two lengths written, its count of live columns read and written
    moved = 2 * written * 4 + batch + 4 * num_tokens * 4
    today = 2 * num_tokens * width * 4
    print(f"index builder, {width} columns, {num_tokens} decode tokens a step")
    print(f"  buffers           {held / MIB:8.2f} MiB   (expanded table {rows.nbytes / MIB:.2f},")
    print(
        f"                               index_buffer_bytes {index_buffer_bytes(layout) / MIB:.2f})"
    )
    print(f"  full copy's       {expected.nbytes / MIB:8.2f} MiB")
    print(
        f"  moved a step      {moved / 1e6:8.3f} MB    ({written} columns written, read once each)"
    )
    print(f"  full copy's       {today / 1e6:8.3f} MB")
    print(f"  reference's time  {median_us(lambda: builder.build(common), runs):8.0f} us")
    print(f"  full copy's       {median_us(lambda: full_copy(common, expected), 3):8.0f} us")


def report_host_part(runs: int) -> None:
    attention = AttentionSpec(block_size=64)
    mamba = MambaSpec(block_size=64, mode="align", num_speculative_blocks=NUM_DRAFTS)
    kinds: list[tuple[str, CacheSpec]] = [("dsa", attention), ("mla", attention), ("mamba", mamba)]
    print(f"host part of a decode build, {NUM_REQS} requests, kernels left out")
    for name, spec in kinds:
        layout = BlockTableLayout.plan(spec, LIMITS)
        module = "mamba" if name == "mamba" else "drafts"
        with mock.patch(f"bt_builders.{module}.operations_for", return_value=Nothing()):
            builder: DSAIndexerMetadataBuilder | MLAMetadataBuilder | MambaMetadataBuilder
            if name == "dsa":
                builder = DSAIndexerMetadataBuilder(layout, "cpu", block_table_width=layout.width)
            elif name == "mla":
                builder = MLAMetadataBuilder(layout, "cpu")
            else:
                builder = MambaMetadataBuilder(layout, "cpu")
        common = decode_batch(layout)
        guard = BatchGuard(layout, "cpu")

        def check() -> None:
            # a new object each step: one that was checked is not read again
            guard.check(replace(common))  # noqa: B023

        print(
            f"  {name:<17} {processor_us(lambda: builder.build(common), runs)}, "  # noqa: B023
            f"the check once per group {processor_us(check, runs)}"
        )


def report_chunks(runs: int) -> None:
    draw = np.random.default_rng(0)
    query_lens = draw.integers(1, 2000, 4096, dtype=np.int32)
    computed = draw.integers(0, 5000, 4096, dtype=np.int32)
    cut = cut_chunks(query_lens, computed, 256)
    sizes = np.diff(cut.cu_chunk_seqlens)
    if sizes.sum() != query_lens.sum() or sizes.max() > 256 or sizes.min() < 1:
        raise SystemExit("the chunks are not the tokens: no time is told")
    spent = median_us(lambda: cut_chunks(query_lens, computed, 256), runs)
    print(f"chunk metadata, 4,096 requests, {cut.seq_idx.size} chunks of at most 256 tokens")
    print(f"  one core          {spent:8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}, one thread"
    )
    report_index_buffers(max(runs // 10, 5))
    report_host_part(runs)
    report_chunks(runs)


if __name__ == "__main__":
    main()
