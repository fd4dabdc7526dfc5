"""The backend: one head of causal attention that reads the cache through a token table."""

import torch

from bt_builders import AttentionBackend
from bt_width import MultipleOf

from .builder import TokenTable, TokenTableBuilder

BACKEND = AttentionBackend(
    name="token-attention",
    builder_class=TokenTableBuilder,
    supported_kernel_block_sizes=[MultipleOf(8)],
)


def attend(queries: torch.Tensor, cache: torch.Tensor, table: TokenTable) -> torch.Tensor:
    """Return what each query finds in its own request, up to its own place.

    Args:
        queries: [T, D].
        cache: [slots, 2, D]; each token's key and value.
        table: The step's metadata.
    """
    keys, values = cache[table.slots[table.request_of_token]].unbind(2)
    places = torch.arange(keys.shape[1], device=keys.device)
    hidden = places > table.positions.unsqueeze(1)
    scores = torch.einsum("td,tkd->tk", queries, keys) / queries.shape[1] ** 0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(1)
    # what is hidden may be another request's, or nothing yet: it must not even be weighed
    return torch.einsum("tk,tkd->td", weights, values.masked_fill(hidden.unsqueeze(2), 0.0))
