"""Captured steps, replayed with padding: the same tokens, and nothing of an earlier batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.bt_runner.harness import (
    SpoiledDrafter,
    Traffic,
    decode,
    decode_all_densely,
    greedy_traffic,
    recompute,
    tiny_engine,
    tiny_hybrid,
    tiny_limits,
    tiny_options,
    tiny_weights,
)
from tests.support.thread_ranks import ThreadRank, run_ranks

from bt_builders import (
    CudagraphLevel,
    CudagraphSupport,
    DSAIndexerMetadataBuilder,
    MambaMetadata,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
)
from bt_runner.cuda_graphs import GraphOptions, graph_sizes
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError
from bt_runner.input_batch import InputBuffers
from bt_runner.models.paged_model import PagedModel
from bt_runner.models.step import ModelStep
from bt_tables import StagedBlockTables, StepBatch, StepTables
from bt_width import PAD_SLOT, ContextParallel

SIZES = (1, 2, 4, 6)


def _traffic() -> Traffic:
    traffic = greedy_traffic(3, (9, 14, 3, 20, 6), max_new_tokens=16)
    lengths = [4, 16, 9, 12, 6]
    params = [type(each)(max_new_tokens=n) for each, n in zip(traffic.params, lengths, strict=True)]
    return Traffic(traffic.prompts, params)


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_padded_step_gives_the_tokens_of_an_unpadded_one(num_drafts: int, mode: str) -> None:
    """Also after a larger batch, whose rows must not shine through.

    Reported as https://github.com/local-inference-lab/vllm/issues/621
    and https://github.com/sgl-project/sglang/pull/10892
    """
    traffic = _traffic()
    wanted = decode_all_densely(traffic)
    engine = tiny_engine(
        tiny_limits(num_speculative_tokens=num_drafts, max_num_reqs=6, max_num_batched_tokens=24),
        tiny_options(mamba_mode=mode, num_speculative_blocks=num_drafts),
        drafter=SpoiledDrafter(traffic, wanted, 0.6) if num_drafts else None,
        batch_sizes=SIZES,
    )
    assert decode(engine, traffic) == wanted


def test_padding_rows_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 0, state 0, length 0, slot -1: whatever stood there in the step before.

    Reported as https://github.com/vllm-project/vllm/pull/35431
    and https://github.com/vllm-project/vllm/pull/39064
    and https://github.com/vllm-project/vllm/pull/33937
    and https://github.com/vllm-project/vllm-gaudi/pull/951
    and https://github.com/ovg-project/kvcached/pull/398
    and https://github.com/vllm-project/vllm/pull/37728
    and https://github.com/local-inference-lab/vllm/issues/621
    and https://github.com/sgl-project/sglang/pull/10892
    """
    seen: list[int] = []

    def look(self: PagedModel, step: ModelStep) -> list[torch.Tensor]:
        for group in step.groups.values():
            common = group.common
            padding = common.seq_lens == 0
            assert (common.block_table[padding] == 0).all()
            tokens = padding[step.req_of_token]
            assert (common.slot_mapping[tokens] == PAD_SLOT).all()
            assert (step.positions[tokens] < 0).all()
            seen.append(int(padding.sum()))
        states = step.groups["mamba"].of(MambaMetadata).states
        assert (states.state_ids[padding] == 0).all()
        assert (states.source_ids[padding] == 0).all()
        assert not states.has_initial_states[padding].any()
        return forward(self, step)

    forward = PagedModel.forward
    monkeypatch.setattr(PagedModel, "forward", look)
    decode(tiny_engine(tiny_limits(max_num_reqs=6), batch_sizes=SIZES), _traffic())
    assert max(seen) > 0


def test_the_null_blocks_stay_as_they_were() -> None:
    """Padding writes there what it finds there."""
    engine = tiny_engine(tiny_limits(max_num_reqs=6), batch_sizes=SIZES)
    caches = engine._caches
    for cache in caches.tensors.values():
        cache[0] = torch.nan
    traffic = _traffic()
    assert decode(engine, traffic) == decode_all_densely(traffic)
    for group, layout in zip(engine.groups, engine.layouts, strict=True):
        null = layout.kernel_blocks_per_block if layout.kind == "attention" else 1
        for tensor in group.tensors:
            assert caches[tensor.layer, tensor.name][:1].isnan().all()
            assert not caches[tensor.layer, tensor.name][null:].isnan().any()


def test_what_a_graph_would_capture_never_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables, slots and the builders' own buffers keep their addresses over a whole run.

    Reported as https://github.com/vllm-project/vllm/pull/35671
    and https://github.com/vllm-project/vllm/pull/34903
    """
    addresses: dict[str, set[int]] = {}

    def note(name: str, *tensors: torch.Tensor) -> None:
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                addresses.setdefault(f"{name} {index}", set()).add(tensor.data_ptr())

    def noting(owner: type, name: str, pick: Callable[[Any], tuple[torch.Tensor, ...]]) -> None:
        method = getattr(owner, name)

        def noted(self: object, argument: object) -> object:
            result = method(self, argument)
            note(owner.__name__, *pick(result))
            return result

        monkeypatch.setattr(owner, name, noted)

    forward = PagedModel.forward

    def noted_forward(self: PagedModel, step: ModelStep) -> list[torch.Tensor]:
        # where they lie depends on the size of the step, as a graph does
        num_reqs = step.groups["dense"].common.num_reqs
        name = f"step of {num_reqs} requests and {len(step.token_ids)} tokens"
        common = step.groups["dense"].common
        note(name, step.token_ids, step.positions, step.req_of_token, common.seq_lens)
        return forward(self, step)

    monkeypatch.setattr(PagedModel, "forward", noted_forward)

    def tables(result: StepTables) -> tuple[torch.Tensor, ...]:
        return (*result.block_tables, result.slot_mappings)

    noting(StagedBlockTables, "step", tables)
    noting(MLAMetadataBuilder, "build", lambda found: (found.decode.token_seq_lens,))
    noting(DSAIndexerMetadataBuilder, "build", lambda found: (found.decode.seq_lens,))
    noting(
        MambaMetadataBuilder,
        "build",
        lambda found: (found.states.source_ids, found.states.state_ids),
    )
    decode(tiny_engine(tiny_limits(max_num_reqs=6), batch_sizes=SIZES), _traffic())
    assert len([name for name in addresses if not name.startswith("step")]) == 8
    assert {name: len(found) for name, found in addresses.items() if len(found) > 1} == {}


def test_a_batch_above_the_largest_size_is_not_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it is.

    Reported as https://github.com/GeeeekExplorer/nano-vllm/pull/258
    """
    sizes: list[tuple[int, int]] = []
    step = StagedBlockTables.step

    def look(self: StagedBlockTables, batch: StepBatch) -> StepTables:
        sizes.append((int((torch.as_tensor(batch.idx_mapping) >= 0).sum()), batch.num_reqs_padded))
        return step(self, batch)

    monkeypatch.setattr(StagedBlockTables, "step", look)
    decode(tiny_engine(tiny_limits(max_num_reqs=6), batch_sizes=(2, 4)), _traffic())
    assert (5, 5) in sizes
    assert (3, 4) in sizes


def test_uniform_decodes_are_replayed_and_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, and batches above the largest size, run as they are."""
    eager: list[bool] = []
    forward = PagedModel.forward
    traffic = greedy_traffic(4, (9, 14, 3), max_new_tokens=8)
    wanted = decode_all_densely(traffic)
    engine = tiny_engine(batch_sizes=(1, 4))

    def look(self: PagedModel, step: ModelStep) -> list[torch.Tensor]:
        eager.append(bool(step.groups["dense"].common.is_prefilling.any()))
        return forward(self, step)

    # captured work keeps the method it was captured with
    monkeypatch.setattr(PagedModel, "forward", look)
    assert decode(engine, traffic) == wanted
    assert eager
    assert all(eager)
    assert len(eager) < engine.num_steps - 4


def test_a_tensor_that_moves_is_missed_by_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above can fail: the stand-in for a graph reads what was captured."""
    traffic = greedy_traffic(4, (9, 14, 3), max_new_tokens=8)
    wanted = decode_all_densely(traffic)
    parts = InputBuffers._device_parts

    def moved(self: InputBuffers, *size: int) -> Any:
        found = parts(self, *size)
        moving = {name: found.inputs[name].clone() for name in ("positions", "token_ids")}
        return found._replace(inputs=found.inputs | moving)

    monkeypatch.setattr(InputBuffers, "_device_parts", moved)
    assert decode(tiny_engine(batch_sizes=()), traffic) == wanted
    assert decode(tiny_engine(batch_sizes=SIZES), traffic) != wanted


@pytest.mark.parametrize(
    ("level", "sizes"),
    [
        ("always", [(1, 1), (1, 3), (4, 1), (4, 3), (6, 1)]),
        ("uniform", [(1, 1), (1, 3), (4, 1), (4, 3), (6, 1)]),
        ("single", [(1, 1), (4, 1), (6, 1)]),
        ("never", []),
    ],
)
def test_sizes_are_those_that_builders_and_limits_allow(
    level: CudagraphLevel, sizes: list[tuple[int, int]]
) -> None:
    """Six requests of three tokens are more than a step of sixteen holds."""
    limits = tiny_limits(max_num_reqs=6, num_speculative_tokens=2)
    assert graph_sizes((1, 4, 6), limits, CudagraphSupport(level, "a builder")) == sizes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_graphs_without_a_device_are_refused() -> None:
    """When the engine is made, not when the first step is due."""
    graphs = GraphOptions(batch_sizes=(1,))
    with pytest.raises(BadInputError, match="CUDA graphs need a CUDA device"):
        Engine(tiny_hybrid(), tiny_weights(), tiny_limits(), options=tiny_options(), graphs=graphs)


def test_several_ranks_replay_what_one_computes() -> None:
    """What they exchange is part of the work."""
    traffic = greedy_traffic(5, (9, 14, 3), max_new_tokens=8)

    def work(ranks: ThreadRank) -> list[list[int]]:
        context = ContextParallel(size=2, rank=ranks.rank, interleave=2)
        engine = Engine(
            tiny_hybrid(),
            tiny_weights(),
            tiny_limits(context_parallel=context),
            options=tiny_options(),
            ranks=ranks,
            graphs=GraphOptions(batch_sizes=(2, 4), capture=recompute),
        )
        return decode(engine, traffic)

    wanted = decode_all_densely(traffic)
    assert run_ranks(2, work) == [wanted, wanted]


@pytest.mark.cuda
@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4)], ids=["eager", "graphs"])
def test_a_gpu_gives_the_tokens_of_the_reference(batch_sizes: tuple[int, ...]) -> None:
    """With and without graphs."""
    traffic = greedy_traffic(6, (9, 14, 3, 40), max_new_tokens=16)
    weights = {name: tensor.cuda() for name, tensor in tiny_weights().items()}
    graphs = GraphOptions(batch_sizes=batch_sizes)
    engine = Engine(tiny_hybrid(), weights, tiny_limits(), options=tiny_options(), graphs=graphs)
    assert decode(engine, traffic) == decode_all_densely(traffic)
