"""The check is known to fail: the paged path is broken on purpose, and the check says where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import greedy_traffic, tiny_engine, verdicts
from torch import Tensor

from bt_builders import MambaMetadataBuilder
from bt_runner.demo.check import Difference
from bt_runner.models import paged_model
from bt_runner.models.layers import mamba2, mla, numerics, sparse_attention
from bt_runner.models.layers.numerics import Rope
from bt_tables import StagedBlockTables, StepTables

MAMBA_LAYERS, SPARSE_LAYERS, DENSE_LAYER = (0, 4), (1, 2), 3


def _differences() -> list[Difference]:
    found = verdicts(
        tiny_engine(sanitizes=False), greedy_traffic(1, (30, 21, 12, 26), max_new_tokens=10)
    )
    return [verdict.difference for verdict in found if verdict.difference is not None]


def _first_layer() -> int | None:
    differences = _differences()
    assert differences
    return differences[0].layer


def _replace_tables(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[StepTables], StepTables]
) -> None:
    step = StagedBlockTables.step
    monkeypatch.setattr(StagedBlockTables, "step", lambda self, batch: change(step(self, batch)))


def test_an_unbroken_path_has_no_difference() -> None:
    """The faults below are what the check finds, not the check itself."""
    assert _differences() == []


@pytest.mark.parametrize(
    ("group", "layer"), [(0, DENSE_LAYER), (1, SPARSE_LAYERS[0])], ids=["dense", "sparse"]
)
def test_a_wrong_column_is_found(monkeypatch: pytest.MonkeyPatch, group: int, layer: int) -> None:
    """Two columns of every row of a group change places."""

    def change(tables: StepTables) -> StepTables:
        changed = tables.block_tables[group].clone()
        changed[:, [0, 1]] = changed[:, [1, 0]]
        found = list(tables.block_tables)
        found[group] = changed
        return StepTables(tuple(found), tables.slot_mappings)

    _replace_tables(monkeypatch, change)
    assert _first_layer() == layer


@pytest.mark.parametrize("group", [0, 1, 2], ids=["dense", "sparse", "mamba"])
def test_a_stale_row_is_found(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    """The first row stays what it was a step ago."""
    stale: list[Tensor] = []

    def change(tables: StepTables) -> StepTables:
        fresh = tables.block_tables[group].clone()
        changed = fresh.clone()
        if stale:
            changed[0] = stale.pop()[0]
        stale.append(fresh)
        found = list(tables.block_tables)
        found[group] = changed
        return StepTables(tuple(found), tables.slot_mappings)

    _replace_tables(monkeypatch, change)
    assert _differences()


@pytest.mark.parametrize(
    ("group", "layer"), [(0, DENSE_LAYER), (1, SPARSE_LAYERS[0])], ids=["dense", "sparse"]
)
def test_a_swapped_slot_is_found(monkeypatch: pytest.MonkeyPatch, group: int, layer: int) -> None:
    """A step's first two tokens are written to each other's slots."""

    def change(tables: StepTables) -> StepTables:
        slots = tables.slot_mappings.clone()
        if slots.shape[1] > 1:
            slots[group, [0, 1]] = slots[group, [1, 0]]
        return StepTables(tables.block_tables, slots)

    _replace_tables(monkeypatch, change)
    assert _first_layer() == layer


def test_a_stale_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new request goes on from the state of whoever had its block."""
    build = MambaMetadataBuilder.build

    def stale(self: MambaMetadataBuilder, common: Any) -> Any:
        metadata = build(self, common)
        for states in (metadata.states, metadata.decode.states, metadata.prefill.states):
            states.source_ids.copy_(states.state_ids[:, 0])
            states.has_initial_states.fill_(True)
        return metadata

    monkeypatch.setattr(MambaMetadataBuilder, "build", stale)
    engine = tiny_engine(num_blocks=[50, 30, 2], sanitizes=False)
    found = verdicts(engine, greedy_traffic(1, (30, 21, 12, 26), max_new_tokens=10))
    assert found[0].difference is None
    assert found[1].difference is not None
    assert found[1].difference.layer == MAMBA_LAYERS[0]


def test_a_shifted_rope_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded tokens turn as if they stood one place further on."""

    class Shifted(numerics.Rotation):
        def __init__(self, rope: Rope, positions: Tensor, dtype: torch.dtype) -> None:
            super().__init__(rope, positions + (len(positions) <= 4), dtype)

    monkeypatch.setattr("bt_runner.models.step.Rotation", Shifted)
    assert _first_layer() in SPARSE_LAYERS


def test_a_missing_relu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer then chooses other tokens."""

    def score(query: sparse_attention.IndexQuery, keys: Tensor) -> Tensor:
        products = torch.einsum("bmhd,bsd->bmhs", query.heads, keys)
        return torch.einsum("bmh,bmhs->bms", query.weights, products)

    monkeypatch.setattr("bt_runner.models.layers.sparse_attention.score", score)
    assert _first_layer() == SPARSE_LAYERS[0]


def test_a_future_token_that_is_seen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column too many is visible to every query."""
    attend = mla.attend

    def lenient(query: Tensor, rows: Tensor, visible: Tensor, **kwargs: Any) -> Any:
        shifted = torch.cat((visible[..., :1], visible[..., :-1]), dim=-1)
        return attend(query, rows, visible | shifted, **kwargs)

    monkeypatch.setattr(mla, "attend", lenient)
    assert _first_layer() == DENSE_LAYER


def test_a_forgotten_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The convolution sees a token alone, and nothing before it."""
    convolve = mamba2.convolve
    monkeypatch.setattr(
        mamba2,
        "convolve",
        lambda lines, taps, bias: convolve(lines, taps * torch.eye(len(taps))[-1, :, None], bias),
    )
    assert _first_layer() == MAMBA_LAYERS[0]


def test_a_wrong_head_is_found_where_no_layer_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual stream is right, and the logits are not."""
    logits = paged_model.PagedModel.logits
    monkeypatch.setattr(
        paged_model.PagedModel, "logits", lambda self, hidden: -logits(self, hidden)
    )
    assert _first_layer() is None


def test_the_step_and_the_position_of_a_fault_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is dropped in step 4 shows in step 4, at the token that misses it."""
    calls = []

    def change(tables: StepTables) -> StepTables:
        calls.append(1)
        if len(calls) != 4:
            return tables
        return StepTables(tables.block_tables, torch.full_like(tables.slot_mappings, -1))

    _replace_tables(monkeypatch, change)
    first = _differences()[0]
    assert first.step == 4
    assert first.layer in (DENSE_LAYER, *SPARSE_LAYERS)
    assert f"in step {first.step}, at position {first.position}, in layer {first.layer}" in str(
        first
    )
