"""Mistakes in the paged path are seen by the comparison with transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.engine_oracle import engine_differences
from tests.support.engine_runs import CHUNKED, serve
from tests.support.faults import Case, CaseOf
from tests.support.hf_models import FAMILIES, SPARSE_FAMILIES
from torch import Tensor

from bt_runner.models.layers import mamba2, numerics
from bt_runner.models.step import _Sources
from bt_tables import StagedBlockTables

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]


def _agrees(case: Case) -> bool:
    run = serve(CHUNKED.engine(case.config, case.weights), [case.token_ids], 4)
    return engine_differences(run, case.model).agree()


def _assert_seen(case: Case, fault: Fault) -> None:
    assert _agrees(case)
    with Patch.context() as patch:
        fault(patch)
        assert not _agrees(case)


def unturned_key(patch: Patch) -> None:
    """Cached keys, which have no heads, are not turned."""
    turn = numerics.Rotation.__call__

    def queries_only(self: numerics.Rotation, values: Tensor) -> Tensor:
        return values if values.dim() == 2 else turn(self, values)

    patch.setattr(numerics.Rotation, "__call__", queries_only)


def shifted_chunks(patch: Patch) -> None:
    """Positions start at zero in every step."""
    init = numerics.Rotation.__init__

    def from_zero(self: numerics.Rotation, rope: Any, positions: Tensor, dtype: Any) -> None:
        init(self, rope, positions - positions[0], dtype)

    patch.setattr(numerics.Rotation, "__init__", from_zero)


def no_relu(patch: Patch) -> None:
    """Negative products of the indexer count."""
    patch.setattr(Tensor, "relu_", lambda products: products)


def swapped_blocks(patch: Patch) -> None:
    """The first two columns of every table are taken for each other, in reading alone."""
    step = StagedBlockTables.step

    def swapped(self: StagedBlockTables, *given: Any) -> Any:
        tables = step(self, *given)
        order = [1, 0, *range(2, tables.block_tables[0].shape[1])]
        views = tuple(table.copy_(table[:, order]) for table in tables.block_tables)
        self.invalidate()
        return tables._replace(block_tables=views)

    patch.setattr(StagedBlockTables, "step", swapped)


def stale_state(patch: Patch) -> None:
    """What was there before a request is taken for its state."""

    def anything(sources: _Sources, cache: Tensor) -> Tensor:
        is_there = sources._states.has_initial_states.view(-1, *(1,) * (cache.dim() - 1))
        return cache[sources._states.source_ids].masked_fill(~is_there, 0.5)

    patch.setattr(_Sources, "__call__", anything)


def forgotten_state(patch: Patch) -> None:
    """Every step starts from nothing."""

    def nothing(sources: _Sources, cache: Tensor) -> Tensor:
        return torch.zeros_like(cache[sources._states.source_ids])

    patch.setattr(_Sources, "__call__", nothing)


def unwritten_state(patch: Patch) -> None:
    """Mixers read their states and never write them."""
    patch.setattr(mamba2, "write", lambda cache, places, values: None)


@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("fault", [unturned_key, shifted_chunks, swapped_blocks])
def test_fault_in_attention_is_seen(case_of: CaseOf, family: str, fault: Fault) -> None:
    """Every family with attention shows it."""
    _assert_seen(case_of(family), fault)


@pytest.mark.parametrize("family", SPARSE_FAMILIES)
def test_missing_relu_is_seen(case_of: CaseOf, family: str) -> None:
    """Both families with indexers show it."""
    _assert_seen(case_of(family), no_relu)


@pytest.mark.parametrize("fault", [stale_state, forgotten_state, unwritten_state])
def test_fault_in_states_is_seen(case_of: CaseOf, fault: Fault) -> None:
    """A mixer shows it."""
    _assert_seen(case_of("mamba2"), fault)
