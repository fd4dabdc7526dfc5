"""Contexts are gathered in pieces that begin at whole blocks on every rank."""

import random

import pytest
from tests.support.batches import Request, make_batch, rows_of
from tests.support.plans import serving_limits

from bt_builders import ContextSpan, MLAContextChunk, MLAMetadataBuilder, MLAOptions, pack_contexts
from bt_width import AttentionSpec, BlockTableLayout, InvalidSpecError

pytestmark = pytest.mark.fast


def plan_mla(
    *,
    block_size: int = 16,
    kernel_block_size: int | None = None,
    size: int = 1,
    rank: int = 0,
    interleave: int = 1,
    max_model_len: int = 2000,
) -> BlockTableLayout:
    limits = serving_limits(
        max_model_len,
        max_num_reqs=8,
        max_num_batched_tokens=256,
        size=size,
        rank=rank,
        interleave=interleave,
    )
    return BlockTableLayout.plan(AttentionSpec(block_size=block_size), limits, kernel_block_size)


def context_chunks(
    layout: BlockTableLayout, requests: list[Request], workspace_tokens: int
) -> tuple[MLAContextChunk, ...]:
    options = MLAOptions(workspace_tokens=workspace_tokens)
    builder = MLAMetadataBuilder.configured(options)(layout, "cpu")
    return builder.build(make_batch(layout, requests)).prefill.context_chunks


def test_chunks_end_at_whole_blocks_of_all_ranks() -> None:
    """Blocks of 128 on 4 ranks, interleave 128: 1000 tokens are 512 + 488, not 128s.

    Reported as https://github.com/vllm-project/vllm-ascend/pull/5767
    """
    layout = plan_mla(block_size=128, size=4, interleave=128)

    chunks = context_chunks(layout, [Request(1010, 10, is_prefilling=True)], 600)

    assert [chunk.num_tokens for chunk in chunks] == [512, 488]
    assert [chunk.starts.tolist() for chunk in chunks] == [[0], [512]]


def test_contexts_share_a_workspace_until_it_is_full() -> None:
    chunks = pack_contexts([100, 0, 50, 300], 256, unit=16, turn=1)

    assert chunks == [
        [ContextSpan(0, 0, 100), ContextSpan(2, 0, 50), ContextSpan(3, 0, 96)],
        [ContextSpan(3, 96, 204)],
    ]


def test_a_remainder_below_a_block_opens_a_new_chunk() -> None:
    assert pack_contexts([60, 40], 64, unit=16, turn=1) == [
        [ContextSpan(0, 0, 60)],
        [ContextSpan(1, 0, 40)],
    ]


def test_room_counts_whole_turns_of_the_ranks() -> None:
    """Two contexts of 17 tokens take 32 rows each where a turn is 16, and 64 hold no third."""
    chunks = pack_contexts([17, 17, 17], 64, unit=32, turn=16)

    assert [[span.req for span in chunk] for chunk in chunks] == [[0, 1], [2]]


def test_the_rows_of_all_ranks_fit_in_the_workspace() -> None:
    """Contexts of 9 tokens, 8 by 8 on two ranks, take 16 rows each: 64 hold four, not seven."""
    layout = plan_mla(size=2, interleave=8)

    chunks = context_chunks(layout, [Request(11, 2, is_prefilling=True)] * 7, 64)

    assert [2 * chunk.num_local_rows for chunk in chunks] == [64, 48]


def test_no_context_is_no_chunk() -> None:
    layout = plan_mla()

    assert context_chunks(layout, [Request(30, 30, is_prefilling=True)], 64) == ()


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (2, 8), (3, 16)], ids=str)
@pytest.mark.parametrize("workspace_tokens", [96, 256, 4096])
def test_gathered_pieces_are_the_contexts(
    size: int, interleave: int, workspace_tokens: int
) -> None:
    """Each rank gathers its spans through its row; the ranks' rows together are the context.

    The gather is the plainest there is: span by span, token by token, from block ids.
    """
    draw = random.Random(f"{size}{interleave}{workspace_tokens}")
    requests = []
    for _ in range(4):
        query_len = draw.randint(2, 20)
        context = draw.choice([0, 1, 37, 160, 333])
        requests.append(Request(context + query_len, query_len, is_prefilling=True))
    layouts = [
        plan_mla(kernel_block_size=8, size=size, rank=rank, interleave=interleave)
        for rank in range(size)
    ]
    of_rank = [context_chunks(layout, requests, workspace_tokens) for layout in layouts]
    seen: list[list[int]] = [[] for _ in requests]
    for chunks in zip(*of_rank, strict=True):
        gathered: list[tuple[int, int] | None] = []
        for layout, chunk in zip(layouts, chunks, strict=True):
            gathered += gather(layout, requests, chunk)
        chunk = chunks[0]
        assert len(gathered) == size * chunk.num_local_rows
        assert chunk.num_tokens <= workspace_tokens
        for req, row in zip(chunk.token_to_req.tolist(), chunk.gathered_rows.tolist(), strict=True):
            found = gathered[row]
            assert found is not None
            assert found[0] == req
            seen[req].append(found[1])

    assert seen == [list(range(request.num_computed)) for request in requests]


def gather(
    layout: BlockTableLayout, requests: list[Request], chunk: MLAContextChunk
) -> list[tuple[int, int] | None]:
    """What one rank copies to its rows of the workspace: request and position, or a gap."""
    owner = {}
    for index, (request, row) in enumerate(zip(requests, rows_of(layout, requests), strict=True)):
        for position in range(request.num_computed):
            slot = layout.slot(position, row)
            if slot >= 0:
                owner[slot] = index, position
    rows: list[tuple[int, int] | None] = [None] * chunk.num_local_rows
    table = make_batch(layout, requests).block_table.tolist()
    for req, ids in enumerate(table):
        first, size = int(chunk.local_starts[req]), int(chunk.local_seq_lens[req])
        assert first % layout.kernel_block_size == 0
        assert size <= int(chunk.local_cu_seq_lens[req + 1] - chunk.local_cu_seq_lens[req])
        for place in range(first, first + size):
            column, offset = divmod(place, layout.kernel_block_size)
            target = int(chunk.local_cu_seq_lens[req]) + place - first
            rows[target] = owner[ids[column] * layout.kernel_block_size + offset]
    return rows


def test_ranks_gather_no_more_rows_than_the_longest_of_them_keeps() -> None:
    """37 and 8 tokens on two ranks, 8 by 8: 21 and 8 rows on each, the first rank's parts."""
    layout = plan_mla(size=2, rank=1, interleave=8)
    requests = [Request(40, 3, is_prefilling=True), Request(18, 10, is_prefilling=True)]

    (chunk,) = context_chunks(layout, requests, 4096)

    assert chunk.local_cu_seq_lens.tolist() == [0, 21, 29]
    assert chunk.num_local_rows == 29
    assert chunk.local_seq_lens.tolist() == [16, 0]


def test_a_context_below_its_bound_leaves_no_stranger_in_the_workspace() -> None:
    """Undecided drafts make the host's bound too long; the device counts what is there."""
    layout = plan_mla()
    loose = [Request(50, 10, bound_slack=3), Request(60, 20)]

    (chunk,) = context_chunks(layout, loose, 4096)

    assert chunk.num_tokens == 83
    assert chunk.cu_seq_lens.tolist() == [0, 40, 80]
    assert chunk.token_to_req.tolist() == [0] * 40 + [1] * 40 + [2] * 3
    assert chunk.gathered_rows.tolist()[80:] == [0] * 3
    assert max(chunk.gathered_rows.tolist()) < chunk.num_local_rows


def test_a_workspace_below_one_span_is_refused() -> None:
    layout = plan_mla(block_size=128, size=4, interleave=128)

    with pytest.raises(
        InvalidSpecError, match=r"MLAOptions\.workspace_tokens is 511 and must be at least 512"
    ):
        MLAMetadataBuilder.configured(MLAOptions(workspace_tokens=511))(layout, "cpu")
