"""The table kernels as the compiler sees them: where they are, and their parameters' types."""

from __future__ import annotations

from tests.support.compiled import KernelUse

_STEP = {
    "packet_ptr": "*i32",
    "groups_ptr": "*i64",
    "rows_ptr": "*i32",
    "batch_ptr": "*i32",
    "slots_ptr": "*i64",
    "query_start_ptr": "*i32",
    "positions_ptr": "*i64",
}
_CSR = {
    "table_ptr": "*i32",
    "table_row_stride": "i32",
    "indptr_ptr": "*i32",
    "indices_ptr": "*i32",
    "num_requests": "i32",
    "num_indices": "i32",
    "search_steps": "i32",
    "tokens_per_column": "i32",
}

TABLE_KERNELS = (
    KernelUse(
        "fused_step",
        "bt_tables.kernels.fused_step:fused_step_kernel",
        _STEP,
        {"SEARCH_STEPS": 9, "TOKEN_TILE": 128, "COLUMN_TILE": 512},
    ),
    KernelUse(
        "gather_csr (ids)", "bt_tables.kernels.gather_csr:gather_csr_kernel", _CSR, {"TILE": 512}
    ),
    KernelUse(
        "gather_csr (slots)",
        "bt_tables.kernels.gather_csr:gather_csr_kernel",
        {**_CSR, "indices_ptr": "*i64"},
        {"TILE": 512},
    ),
)
