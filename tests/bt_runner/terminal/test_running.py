"""A command gives torch its threads back, whoever called it."""

from __future__ import annotations

import pytest
import torch

from bt_runner.terminal.running import one_thread


def test_torch_has_one_thread_inside_and_its_own_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    inside = []

    def interrupted() -> None:
        with one_thread():
            inside.append(torch.get_num_threads())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    found = (inside, torch.get_num_threads())
    torch.set_num_threads(before)

    assert found == ([1], 2)
