"""How many blocks each group's pool has: as told, or enough for all requests that may run."""

from __future__ import annotations

from collections.abc import Sequence

from bt_runner.arguments import as_list, require_int
from bt_runner.errors import BadInputError
from bt_width import BlockTableLayout


def pool_sizes(
    layouts: Sequence[BlockTableLayout], num_blocks: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the blocks of each group's pool, the null block included.

    Args:
        layouts: The groups' plans.
        num_blocks: Of each pool, or of all; by default enough for as many of the longest
            requests as may run.

    Raises:
        BadInputError: They are not as many as the groups, or one is no int.
    """
    if isinstance(num_blocks, int):
        require_int("num_blocks", num_blocks)
        return (num_blocks,) * len(layouts)
    if num_blocks is not None:
        sizes = tuple(as_list("num_blocks", num_blocks))
        for size in sizes:
            require_int("a pool's num_blocks", size)
        if len(sizes) != len(layouts):
            raise BadInputError(
                f"num_blocks has {len(sizes)} pools, and the model {len(layouts)} cache groups",
                num_pools=len(sizes),
                num_groups=len(layouts),
            )
        return sizes
    return tuple(
        1
        + layout.limits.max_num_reqs
        * layout.max_resident_blocks(layout.limits.max_num_batched_tokens)
        for layout in layouts
    )
