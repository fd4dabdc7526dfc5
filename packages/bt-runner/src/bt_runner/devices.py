"""Which device a name means, checked before anything is put there."""

from __future__ import annotations

import os

import torch

from bt_runner.arguments import require_kind
from bt_runner.errors import BadInputError
from bt_width.errors import shown


def find_device(name: torch.device | str | None) -> torch.device:
    """Return the device called ``name``; without a name CUDA if there is one, else the CPU.

    Where torchrun started several processes, each takes a CUDA device of its own.

    Raises:
        BadInputError: The device is unknown or absent.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    require_kind("device", name, torch.device, str)
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise BadInputError(
            f"device {shown(str(name))} cannot be used: {reason:.300}", device=str(name)
        ) from error
    return device
