"""Promises of the tools that kernels are tested with: each of them can fail."""

from __future__ import annotations

import json

import torch
from tests.support.compiled import ARCHITECTURES, KernelUse, compile_resources, run_compiled
from tests.support.interpreted import shuffled_programs


def test_shuffled_programs_all_run_once() -> None:
    from tests.support.sample_kernels import add_one_kernel

    values = torch.zeros(37, dtype=torch.int32)

    with shuffled_programs(seed=3):
        add_one_kernel[(10,)](values, 37, TILE=4)

    assert values.tolist() == [1] * 37


def test_shuffled_programs_show_a_race_that_the_usual_order_hides() -> None:
    from tests.support.sample_kernels import racy_sum_kernel

    usual, shuffled = torch.ones(9, dtype=torch.int32), torch.ones(9, dtype=torch.int32)

    racy_sum_kernel[(8,)](usual)
    with shuffled_programs(seed=1):
        racy_sum_kernel[(8,)](shuffled)

    assert usual.tolist() == list(range(1, 10))
    assert shuffled.tolist() != usual.tolist()


def test_a_kernel_compiles_for_every_architecture_without_a_gpu() -> None:
    use = KernelUse(
        "sample",
        "tests.support.sample_kernels:add_one_kernel",
        {"values_ptr": "*i32", "size": "i32"},
        {"TILE": 128},
    )

    (found,) = compile_resources([use]).values()

    assert [usage.architecture for usage in found] == list(ARCHITECTURES)
    assert all(usage.registers > 0 and usage.spills == 0 for usage in found)


def test_compilations_are_counted_and_free_values_do_not_add_any() -> None:
    counts = json.loads(run_compiled("tests.support.sample_kernels"))

    assert counts == {"free": 1, "two tiles": 2}
