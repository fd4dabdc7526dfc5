"""Work in pieces, so that a step's temporary tensors fit a stated number of bytes."""

from __future__ import annotations

from collections.abc import Iterator

WORKSPACE_BYTES = 2**28
"""Bytes of a layer's temporary tensors, by default: 256 MiB."""


def pieces(num_items: int, bytes_per_item: int, workspace_bytes: int) -> Iterator[slice]:
    """Cut ``num_items`` into spans whose temporary tensors fit the workspace.

    A span has at least one item, however large that is. Spans follow from numbers of the host
    alone, so that a captured graph always has the same, and all ranks do.
    """
    size = max(workspace_bytes // max(bytes_per_item, 1), 1)
    for start in range(0, num_items, size):
        yield slice(start, min(start + size, num_items))
