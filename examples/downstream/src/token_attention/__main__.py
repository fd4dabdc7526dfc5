"""One step through the backend, compared with attention over each request alone."""

import torch

from bt_builders import AttentionGroup, init_attention
from bt_tables import StagedBlockTables
from bt_width import AttentionSpec, BlockTableLayout, ServingLimits

from .attention import BACKEND, attend
from .builder import TokenTableBuilder
from .step import BLOCK_IDS, QUERY_LENS, SEQ_LENS, run_tables

HEAD = 8


def main() -> None:
    """Plan, make tables and builders, run the step and compare."""
    limits = ServingLimits(max_model_len=40, max_num_reqs=4, max_num_batched_tokens=16)
    group = AttentionGroup(name="layer", spec=AttentionSpec(block_size=16), backends=(BACKEND,))
    setup = init_attention([group], limits, "cpu")
    builder = setup.groups[0].builder(TokenTableBuilder)
    layout = setup.groups[0].layout
    common = run_tables(StagedBlockTables(setup.layouts, device="cpu", num_blocks=[8]))
    table = builder.build(common)
    print(f"{type(builder).__name__}: {layout.width} columns, slots {tuple(table.slots.shape)}")

    torch.manual_seed(0)
    tokens = [torch.randn(length, 3, HEAD, dtype=torch.float64) for length in SEQ_LENS]
    new = torch.cat([t[-count:] for t, count in zip(tokens, QUERY_LENS, strict=True)])
    cache = cache_of(layout, tokens)
    cache[common.slot_mapping] = new[:, 1:]
    expected = torch.cat([plain(t)[-n:] for t, n in zip(tokens, QUERY_LENS, strict=True)])
    print("as plain attention:", torch.allclose(attend(new[:, 0], cache, table), expected))


def cache_of(layout: BlockTableLayout, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Return a cache with what earlier steps wrote, and NaN wherever they did not."""
    cache = torch.full((8 * layout.block_size, 2, HEAD), float("nan"), dtype=torch.float64)
    for block_ids, request, new in zip(BLOCK_IDS, tokens, QUERY_LENS, strict=True):
        row = layout.expand(block_ids)
        for position, token in enumerate(request[:-new]):
            cache[layout.slot(position, row)] = token[1:]
    return cache


def plain(tokens: torch.Tensor) -> torch.Tensor:
    """Return causal attention over the tokens [L, 3, D] of one request."""
    queries, keys, values = tokens.unbind(1)
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(queries[None], keys[None], values[None], is_causal=True)[0]


if __name__ == "__main__":
    main()
