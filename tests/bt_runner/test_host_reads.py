"""A decode step reads nothing back from the device, so that a graph could capture it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import (
    SpoiledDrafter,
    decode,
    decode_all_densely,
    greedy_traffic,
    tiny_engine,
    tiny_limits,
    tiny_options,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bt_runner.models.paged_model import PagedModel
from bt_runner.models.step import ModelStep
from bt_runner.sampler import Sampler, Sampling
from bt_tables.devices import CpuExecutor

READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount"}


class NoHostReads(TorchDispatchMode):
    """Raises on an operation whose shape or result the host would have to wait for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype is torch.bool for index in args[1]
        )
        by_count = name == "repeat_interleave" and func._overloadname == "Tensor"
        if name in READS or by_mask or by_count:
            raise RuntimeError(f"{func} reads the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_drafts", [0, 2], ids=["plain", "ragged-drafts"])
def test_neither_a_layer_nor_a_choice_reads_the_device_while_all_decode(
    monkeypatch: pytest.MonkeyPatch, num_drafts: int
) -> None:
    """Whatever the requests' lengths and drafts are."""
    traffic = greedy_traffic(3, (9, 14, 3, 20), max_new_tokens=10)
    wanted = decode_all_densely(traffic)
    watched: list[int] = []
    forward, choose = PagedModel.forward, Sampler.__call__

    def watch(self: PagedModel, step: ModelStep) -> list[torch.Tensor]:
        if any(group.common.is_prefilling.any() for group in step.groups.values()):
            return forward(self, step)
        watched.append(len(step.token_ids))
        with NoHostReads():
            outputs = forward(self, step)
            self.logits(outputs[-1])
        return outputs

    def watch_choice(self: Sampler, logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        with NoHostReads():
            return choose(self, logits, sampling)

    monkeypatch.setattr(PagedModel, "forward", watch)
    monkeypatch.setattr(Sampler, "__call__", watch_choice)
    engine = tiny_engine(
        tiny_limits(num_speculative_tokens=num_drafts),
        tiny_options(num_speculative_blocks=num_drafts),
        drafter=SpoiledDrafter(traffic, wanted, 0.6, is_ragged=True) if num_drafts else None,
        batch_sizes=(2, 4),
    )
    assert decode(engine, traffic) == wanted
    assert len(watched) > 4


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda values: values.sum().item(), id="item"),
        pytest.param(lambda values: values[values > 0], id="mask"),
        pytest.param(lambda values: values.nonzero(), id="nonzero"),
        pytest.param(lambda values: values.repeat_interleave(values), id="counts"),
    ],
)
def test_a_read_is_seen(read: Callable[[torch.Tensor], object]) -> None:
    """The test above can fail."""
    with NoHostReads(), pytest.raises(RuntimeError, match="reads the device"):
        read(torch.tensor([1, 2]))


def test_a_step_makes_two_copies_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables' packet and the packed input batch, while all requests decode."""
    num_packets = 0
    copy = CpuExecutor.copy

    def noted(self: CpuExecutor, destination: torch.Tensor, source: torch.Tensor) -> None:
        nonlocal num_packets
        num_packets += 1
        copy(self, destination, source)

    monkeypatch.setattr(CpuExecutor, "copy", noted)
    traffic = greedy_traffic(3, (9, 4, 3), max_new_tokens=30)
    engine = tiny_engine(tiny_limits(max_num_batched_tokens=96))
    for prompt, params in zip(traffic.prompts, traffic.params, strict=True):
        engine.add_request(prompt, params)
    engine.step()
    steps, packets, inputs = engine.num_steps, num_packets, engine._runner.inputs.num_copies
    for _ in range(20):
        engine.step()
    assert engine.num_steps - steps == num_packets - packets == 20
    assert engine._runner.inputs.num_copies - inputs == 20
