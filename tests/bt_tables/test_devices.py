"""Promises of devices: what is not there is said, once and clearly."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.support.tables import plan_groups

from bt_tables import MultiGroupBlockTable, StagedBlockTables
from bt_tables.devices import CpuExecutor, CudaExecutor
from bt_width import AttentionSpec, InvalidSpecError, ServingLimits

pytestmark = pytest.mark.fast

LAYOUTS = plan_groups(
    ServingLimits(max_model_len=64, max_num_reqs=2, max_num_batched_tokens=4),
    AttentionSpec(block_size=16),
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is pinned memory")
def test_missing_pinned_memory_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaExecutor, "_warned", False)
    executor = CudaExecutor(torch.device("cuda", 0))

    with pytest.warns(RuntimeWarning, match="no pinned memory"):
        assert executor.host_ints(8).shape == (8,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor.host_ints(8)
        CudaExecutor(torch.device("cuda", 0)).host_ints(8)


@pytest.mark.parametrize("tables", [StagedBlockTables, MultiGroupBlockTable])
@pytest.mark.parametrize("device", ["cuda:99", torch.device("cuda", 99), "mps", "meta", "gpu"])
def test_a_device_that_is_not_there_is_refused(
    tables: type[StagedBlockTables | MultiGroupBlockTable], device: str | torch.device
) -> None:
    with pytest.raises(InvalidSpecError):
        tables(LAYOUTS, device=device)


def test_a_name_a_device_and_an_executor_are_all_welcome() -> None:
    for device in ("cpu", torch.device("cpu"), CpuExecutor()):
        assert StagedBlockTables(LAYOUTS, device=device).device == torch.device("cpu")
