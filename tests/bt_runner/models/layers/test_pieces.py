"""Layers that work in pieces: the same tokens, and tensors that fit the workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import (
    VOCAB,
    SpoiledDrafter,
    decode,
    decode_all_densely,
    greedy_traffic,
    random_prompts,
    tiny_engine,
    tiny_limits,
    tiny_options,
)
from torch.utils._python_dispatch import TorchDispatchMode

from bt_runner.engine import Engine
from bt_runner.models.config import (
    MLA,
    MLP,
    AttentionLayer,
    MambaLayer,
    ModelConfig,
    SelectAll,
    SelectShared,
    SelectTopK,
)
from bt_runner.models.layers.numerics import Rope, pieces
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.weights import random_weights
from bt_runner.requests import SamplingParams
from bt_width import ServingLimits


@pytest.mark.parametrize(
    ("num_items", "workspace", "expected"),
    [
        pytest.param(5, 20, [(0, 2), (2, 4), (4, 5)], id="two-at-a-time"),
        pytest.param(2, 9, [(0, 1), (1, 2)], id="one-is-too-large"),
        pytest.param(2, 1000, [(0, 2)], id="all-at-once"),
        pytest.param(0, 1000, [], id="none"),
    ],
)
def test_spans_cover_all_items_once(
    num_items: int, workspace: int, expected: list[tuple[int, int]]
) -> None:
    """In order, as many at a time as the workspace holds, and at least one."""
    spans = list(pieces(num_items, 10, workspace))

    assert [(span.start, span.stop) for span in spans] == expected


@pytest.mark.parametrize(
    ("workspace_bytes", "num_drafts", "num_batched"),
    [(1, 0, 16), (1, 2, 90), (3_000, 2, 16), (3_000, 0, 90), (20_000, 0, 16), (20_000, 2, 90)],
)
def test_pieces_change_no_token(
    monkeypatch: pytest.MonkeyPatch, workspace_bytes: int, num_drafts: int, num_batched: int
) -> None:
    """One item at a time or a few: prompts in chunks, decodes and drafts as the reference."""
    _set_workspace(monkeypatch, workspace_bytes)
    traffic = greedy_traffic(3, (40, 1, 23, 70, 9))
    expected = decode_all_densely(traffic)
    drafter = SpoiledDrafter(traffic, expected, 0.6, is_ragged=True) if num_drafts else None
    limits = tiny_limits(num_speculative_tokens=num_drafts, max_num_batched_tokens=num_batched)
    options = tiny_options(num_speculative_blocks=num_drafts)

    outputs = decode(tiny_engine(limits, options, drafter=drafter), traffic)

    assert outputs == expected


_ROPE = Rope(dim=8)
_MLA = MLA(num_heads=8, q_lora_rank=32, kv_lora_rank=32, nope_dim=16, v_dim=16, rope=_ROPE)
_TOPK = SelectTopK(num_heads=16, head_dim=16, topk=256, rope=_ROPE)
_MLP = MLP(intermediate_size=64)
_LAYERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "dense": lambda: (AttentionLayer(mla=_MLA, selection=SelectAll(), feed_forward=_MLP),),
    "sparse": lambda: (
        AttentionLayer(mla=_MLA, selection=_TOPK, feed_forward=_MLP),
        AttentionLayer(mla=_MLA, selection=SelectShared(), feed_forward=_MLP),
    ),
    "mamba": lambda: (MambaLayer(num_heads=16, head_dim=16, state_size=32),),
}
WORKSPACE = 2**20
BYTES_PER_TOKEN = 3_000
"""Of the widest line of numbers that is kept for all of a step's tokens at once."""


@pytest.mark.parametrize("kind", _LAYERS)
def test_a_longer_chunk_takes_no_larger_tensors(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Eight times the tokens in a step: the workspace, or a few numbers for each token."""
    _set_workspace(monkeypatch, WORKSPACE)

    largest = {chunk: _largest_tensor(_LAYERS[kind](), chunk) for chunk in (128, 1024)}

    assert largest[128] <= WORKSPACE
    assert largest[1024] <= 1024 * BYTES_PER_TOKEN


@pytest.mark.parametrize("kind", _LAYERS)
def test_the_measure_sees_what_a_workspace_without_end_takes(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """All kinds of layers then ask for more than the bound above."""
    _set_workspace(monkeypatch, 2**40)

    largest = _largest_tensor(_LAYERS[kind](), 1024)

    assert largest > 1024 * BYTES_PER_TOKEN


def _set_workspace(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    make: Any = PagedModel.__init__

    def made(self: PagedModel, *args: Any) -> None:
        make(self, *args[:4], num_bytes)

    monkeypatch.setattr(PagedModel, "__init__", made)


class _Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation made anew."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else [result]
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in args
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self.num_bytes = max(self.num_bytes, storage.nbytes())
        return result


def _largest_tensor(layers: tuple[Any, ...], chunk: int) -> int:
    config = ModelConfig(vocab_size=VOCAB, hidden_size=32, layers=layers)
    weights = random_weights(config, seed=0, dtype=torch.float32)
    limits = ServingLimits(max_model_len=1100, max_num_reqs=2, max_num_batched_tokens=chunk)
    engine = Engine(config, weights, limits)
    engine.add_request(random_prompts(0, [1024])[0], SamplingParams(max_new_tokens=2))
    with _Largest() as seen:
        while engine.has_work:
            engine.step()
    return int(seen.num_bytes)
