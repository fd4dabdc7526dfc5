"""Whether memory can hold what is about to be allocated, asked before any of it is taken."""

from __future__ import annotations

import os

import torch

from bt_runner.errors import BadInputError


def available_bytes(device: torch.device | str) -> int | None:
    """Return the free bytes of a device's memory; None where nobody can say."""
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
