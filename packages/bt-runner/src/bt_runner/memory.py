"""Asks whether memory can hold what is to be allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bt_builders import AttentionGroup
from bt_runner.errors import BadInputError
from bt_width import BlockTableLayout, ServingLimits, index_buffer_bytes

_BYTES_PER_TOKEN = 64
"""Of a step's batch: ids, positions, requests and slots, on the host and on the device."""

_BYTES_PER_REQUEST = 512
"""Of a request's numbers in the scheduler, the batch and the builders."""


def available_bytes(device: torch.device | str) -> int | None:
    """Return the free bytes of a device's memory; None where it is not known."""
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def require_memory(
    what: str, num_bytes: int, device: torch.device | str, *, advice: str = ""
) -> None:
    """Refuse what a device's free memory cannot hold.

    Raises:
        BadInputError: The free memory is less than ``num_bytes``.
    """
    free = available_bytes(device)
    if free is not None and num_bytes > free:
        raise BadInputError(
            f"{what}: {num_bytes:,} bytes are needed, and {device} has {free:,} free"
            f"{': ' if advice else ''}{advice}",
            num_bytes=num_bytes,
            available_bytes=free,
        )


def require_step_memory(
    groups: Sequence[AttentionGroup], limits: ServingLimits, device: torch.device | str
) -> None:
    """Refuse limits whose tables and batches cannot be held, before builders allocate them.

    Raises:
        BadInputError: They are more than the free memory; the message names what to lower.
        BlockTableError: No plan serves the limits.
    """
    # two tables of every group: rows by request, and the batch's
    layouts = [BlockTableLayout.plan(group.spec, limits) for group in groups]
    tables = sum(8 * limits.max_num_reqs * layout.width for layout in layouts)
    indices = sum(index_buffer_bytes(layout) for layout in layouts if layout.kind == "attention")
    drafts = limits.max_num_reqs * (1 + limits.num_speculative_tokens) * 16 * len(layouts)
    tokens = limits.max_num_batched_tokens * (_BYTES_PER_TOKEN + 8 * len(layouts))
    requests = limits.max_num_reqs * _BYTES_PER_REQUEST
    require_memory(
        "tables and batches",
        tables + indices + drafts + tokens + requests,
        device,
        advice="lower max_num_reqs, max_model_len or max_num_batched_tokens",
    )


@contextmanager
def memory_refused() -> Iterator[None]:
    """Turn an allocation that fails all the same into an error of one line.

    Raises:
        BadInputError: Memory ran out inside.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise BadInputError(f"memory cannot hold this: {_first_line(error)}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise BadInputError(f"memory cannot hold this: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or ["an allocation failed"]
    return lines[0][:200]
