"""Every kernel compiles for GPUs that are not there, and keeps to its registers."""

import json
from collections.abc import Iterable

import pytest
from tests.support.compiled import ARCHITECTURES, KernelUse, compile_resources, run_compiled

ROWS = {"TOKENS_PER_STATE": 4, "SHARDS": 2, "RANK": 1, "INTERLEAVE": 16}
STATES = {"NULL_BLOCK": 0, "STATE_PAD": 0, "TOKENS_PER_COLUMN": 16, "NUM_STATES": 4}
BATCH = ["block_table_ptr", "num_computed_tokens_ptr", "seq_lens_ptr", "num_accepted_tokens_ptr"]

KERNELS: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    "token_lens": (
        {
            **dict.fromkeys(
                ["query_start_loc_ptr", "seq_lens_ptr", "out_lens_ptr", "out_local_lens_ptr"],
                "*i32",
            ),
            **dict.fromkeys(["N", "T", "search_steps", "max_tokens"], "i32"),
        },
        {**ROWS, "TILE": 128},
    ),
    "expand_rows": (
        {
            "query_start_loc_ptr": "*i32",
            "seq_lens_ptr": "*i32",
            "block_table_ptr": "*i32",
            "block_table_row_stride": "i32",
            "out_lens_ptr": "*i32",
            "out_local_lens_ptr": "*i32",
            "out_table_ptr": "*i32",
            "out_table_row_stride": "i32",
            "num_live_ptr": "*i32",
            **dict.fromkeys(["N", "W", "search_steps", "max_tokens"], "i32"),
        },
        {"NULL_BLOCK": 0, "STATES_PER_COLUMN": 16, **ROWS, "TILE": 512},
    ),
    "compress_slots": (
        {**dict.fromkeys(["positions_ptr", "slot_mapping_ptr", "out_ptr"], "*i64"), "T": "i32"},
        {"PAD_SLOT": -1, "TOKENS_PER_STATE": 4, "TILE": 256},
    ),
    "step_drafts": (
        {
            "block_table_ptr": "*i32",
            "block_table_row_stride": "i32",
            "seq_lens_ptr": "*i32",
            "local_lens_ptr": "*i32",
            "positions_ptr": "*i64",
            "slot_mapping_ptr": "*i64",
            **dict.fromkeys(["N", "W", "step", "max_tokens"], "i32"),
        },
        {
            "NULL_BLOCK": 0,
            "PAD_SLOT": -1,
            "KERNEL_BLOCK_SIZE": 64,
            "ADVANCES": 1,
            **ROWS,
            "TILE": 128,
        },
    ),
    "state_ids": (
        {
            "block_table_ptr": "*i32",
            "block_table_row_stride": "i32",
            **dict.fromkeys([*BATCH[1:], "source_ids_ptr", "state_ids_ptr"], "*i32"),
            "state_ids_row_stride": "i32",
            "out_accepted_ptr": "*i32",
            "has_initial_states_ptr": "*i1",
            "copies_ptr": "*i1",
            **dict.fromkeys(["N", "W", "max_tokens"], "i32"),
        },
        {**STATES, "TILE": 128},
    ),
    "commit_states": (
        {
            "block_table_ptr": "*i32",
            "block_table_row_stride": "i32",
            "num_computed_tokens_ptr": "*i32",
            "seq_lens_ptr": "*i32",
            "num_accepted_before_ptr": "*i32",
            **dict.fromkeys(
                ["num_accepted_tokens_ptr", "source_ids_ptr", "target_ids_ptr"], "*i32"
            ),
            "copies_row_stride": "i32",
            "out_accepted_ptr": "*i32",
            **dict.fromkeys(["N", "W", "max_tokens"], "i32"),
        },
        {**STATES, "NUM_COPIES": 2, "TILE": 128},
    ),
}
FILES = {"state_ids": "states", "commit_states": "states"}


def use_of(name: str, *architectures: int) -> KernelUse:
    where = f"bt_builders.kernels.{FILES.get(name, 'tokens')}:{name}_kernel"
    return KernelUse(name, where, *KERNELS[name], architectures)


def require_registers_alone(uses: Iterable[KernelUse]) -> None:
    """No spill, no stack, no local memory, and few registers."""
    for found in compile_resources(uses).values():
        for usage in found:
            assert (usage.stack, usage.local, usage.spills) == (0, 0, 0)
            assert usage.registers <= 64


def test_the_largest_compile_without_spills_or_local_memory() -> None:
    """On one architecture; `hatch run long` compiles all for all."""
    require_registers_alone([use_of("expand_rows", 90), use_of("step_drafts", 90)])


@pytest.mark.long
@pytest.mark.parametrize("name", KERNELS)
def test_all_compile_without_spills_or_local_memory(name: str) -> None:
    require_registers_alone([use_of(name, *ARCHITECTURES)])


def test_no_batch_needs_a_second_compilation() -> None:
    """Batch sizes, token counts, alignments and strides of 60 steps: one kernel each."""
    answer = json.loads(run_compiled("tests.support.count_builders"))

    assert answer["launches"] >= 60 * len(KERNELS)
    assert answer["compilations"] == dict.fromkeys(KERNELS, 1)
