"""The kernel against the reference: the same verdict, in any order of its programs."""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.support.compiled import KernelUse, compile_resources
from tests.support.interpreted import shuffled_programs
from tests.support.small_engine import SmallStep
from tests.support.spoiled_steps import (
    HYBRID_POOLS,
    SHARING_POOLS,
    copy_of,
    hybrid_layouts,
    plain_engine,
    sharing_layouts,
    spoil,
)

from bt_tables.sanitizer import kernel
from bt_tables.sanitizer.findings import FaultKind
from bt_tables.sanitizer.reference import find_faults
from bt_tables.sanitizer.shapes import ShapeChecks
from bt_tables.sanitizer.step import CacheGroup, CheckedStep, read_arguments
from bt_tables.triton_support import Kernel
from bt_width import BlockTableLayout

CHECK_OF_KIND = {
    **dict.fromkeys([FaultKind.QUERY_START, FaultKind.LENGTH], 0),
    **dict.fromkeys([FaultKind.BLOCK_COUNT, FaultKind.TOO_FEW_BLOCKS], 0),
    **dict.fromkeys([FaultKind.OUT_OF_POOL, FaultKind.NULL_BLOCK, FaultKind.BROKEN_SPLIT], 1),
    **dict.fromkeys([FaultKind.WRONG_BLOCK, FaultKind.STALE_TAIL, FaultKind.PADDING_ROW], 1),
    **dict.fromkeys([FaultKind.FREED_BLOCK, FaultKind.DUPLICATE_BLOCK], 2),
    FaultKind.SHARED_WRITE: 2,
}
"""Which of the kernel's four checks sees a kind; all wrong slots are the last one's."""

KINDS = [
    pytest.param(hybrid_layouts(), HYBRID_POOLS, id="hybrid"),
    pytest.param(sharing_layouts(size=2, rank=1), SHARING_POOLS, id="second-rank-of-two"),
]


class Bench:
    """A kernel and what prepares its steps."""

    def __init__(
        self, layouts: list[BlockTableLayout], pools: list[int], *, untouched: bool = True
    ) -> None:
        self.groups = [
            CacheGroup(layout.addressing, pool) for layout, pool in zip(layouts, pools, strict=True)
        ]
        limits = layouts[0].limits
        self.rows = limits.max_num_reqs
        self.shapes = ShapeChecks(
            self.groups,
            self.rows,
            limits.max_num_batched_tokens,
            fixed_addresses=False,
            checks_untouched=untouched,
            checks_shared_writes=untouched,
        )
        self.kernel = kernel.KernelDetector(self.groups, self.rows, torch.device("cpu"))

    def read(self, step: SmallStep, *, with_refs: bool) -> CheckedStep:
        arguments = read_arguments(
            self.groups,
            step.block_tables,
            step.slot_mappings,
            seq_lens=step.seq_lens,
            query_start_loc=step.query_start_loc,
            num_blocks_of_row=step.num_blocks_of_row,
            ref_counts=step.ref_counts if with_refs else None,
            ref_blocks=step.ref_blocks if with_refs else None,
        )
        checked, findings = self.shapes.check(arguments)
        assert not findings
        return checked

    def verdict_of_reference(self, step: CheckedStep) -> set[tuple[int, int]]:
        """Return the checks that fail, by group; a slot that is only written twice left out."""
        whole = torch.tensor([[group.addressing.width] * self.rows for group in self.groups])
        return {
            (0 if faults.group is None else faults.group, CHECK_OF_KIND.get(faults.kind, 3))
            for faults in find_faults(step, whole)
            if faults.kind is not FaultKind.SLOT_TWICE
        }


class CountedKernel:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        self.launches += 1
        return self.kernel[grid]


def damaged_steps(
    layouts: list[BlockTableLayout], pools: list[int], seed: int, count: int
) -> Iterator[SmallStep]:
    engine, draw = plain_engine(layouts, pools, seed), random.Random(seed)
    for _ in range(count):
        sound = engine.step()
        yield spoil(sound, draw) if draw.random() < 0.7 else sound


def assert_same_verdict(bench: Bench, step: SmallStep, *, with_refs: bool, seed: int) -> None:
    checked = bench.read(step, with_refs=with_refs)
    bench.kernel.forget()
    expected = bench.verdict_of_reference(checked)

    with shuffled_programs(seed):
        flags = bench.kernel.detect(checked)

    found = {(group, check) for group, check in flags.nonzero().tolist()}
    if (0, 0) in expected and step_is_unreadable(checked):
        assert (0, 0) in found
    else:
        assert found == expected


def step_is_unreadable(step: CheckedStep) -> bool:
    starts = step.query_start_loc.tolist()
    slots = min(group.slots.shape[0] for group in step.groups)
    falls = any(a > b for a, b in itertools.pairwise([0, *starts]))
    return bool(starts[0]) or falls or starts[step.num_reqs] > slots


@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize(("layouts", "pools"), KINDS)
def test_the_kernel_says_what_the_reference_says(
    layouts: list[BlockTableLayout], pools: list[int], with_refs: bool
) -> None:
    bench = Bench(layouts, pools)
    for seed, step in enumerate(damaged_steps(layouts, pools, seed=5, count=7)):
        assert_same_verdict(bench, step, with_refs=with_refs, seed=seed)


@pytest.mark.parametrize(("layouts", "pools"), KINDS)
def test_the_kernel_leaves_out_what_the_reference_leaves_out(
    layouts: list[BlockTableLayout], pools: list[int]
) -> None:
    bench = Bench(layouts, pools, untouched=False)
    for seed, step in enumerate(damaged_steps(layouts, pools, seed=6, count=5)):
        assert_same_verdict(bench, step, with_refs=True, seed=seed)


@pytest.mark.long
@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
@pytest.mark.parametrize(("layouts", "pools"), KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_the_kernel_says_what_the_reference_says_of_many_steps(
    layouts: list[BlockTableLayout], pools: list[int], with_refs: bool, seed: int
) -> None:
    bench = Bench(layouts, pools)
    for number, step in enumerate(damaged_steps(layouts, pools, seed, count=100)):
        assert_same_verdict(bench, step, with_refs=with_refs, seed=number)


@pytest.mark.parametrize(
    "tiles",
    [
        pytest.param((4, 4), id="four"),
        pytest.param((8, 32), id="small", marks=pytest.mark.fast),
    ],
)
def test_the_size_of_a_tile_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, tiles: tuple[int, int]
) -> None:
    monkeypatch.setattr(kernel, "_COLUMN_TILE", tiles[0])
    monkeypatch.setattr(kernel, "_TOKEN_TILE", tiles[1])
    layouts = hybrid_layouts()
    bench = Bench(layouts, HYBRID_POOLS)
    for step in damaged_steps(layouts, HYBRID_POOLS, seed=9, count=2):
        assert_same_verdict(bench, step, with_refs=True, seed=0)


@pytest.mark.fast
@pytest.mark.parametrize("with_refs", [True, False], ids=["counts", "no-counts"])
def test_a_verdict_names_the_group_and_the_check(
    monkeypatch: pytest.MonkeyPatch, with_refs: bool
) -> None:
    """A block that was freed, a hole in a row, and the last token's slot, one group each."""
    monkeypatch.setattr(kernel, "_TOKEN_TILE", 8)
    layouts = sharing_layouts()
    bench, engine = Bench(layouts, SHARING_POOLS), plain_engine(layouts, SHARING_POOLS, seed=2)
    step = engine.step()
    while step.num_tokens <= 32 or step.num_blocks_of_row[0].min() < 2:
        step = engine.step()
    spoilt = copy_of(step)
    spoilt.ref_counts[0].zero_()
    spoilt.block_tables[1][0, 1] = 0
    spoilt.slot_mappings[2, step.num_tokens - 1] += 1

    found = bench.kernel.detect(bench.read(spoilt, with_refs=with_refs))

    assert_same_verdict(bench, spoilt, with_refs=with_refs, seed=0)
    assert found.any(dim=1).tolist() == [with_refs, True, True]


@pytest.mark.fast
@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param("row", 0, id="row"),
        pytest.param("column", 1, id="column"),
        pytest.param("owner", 2, id="owner"),
        pytest.param("slot", 3, id="slot"),
        pytest.param("given", 1, id="given"),
    ],
)
def test_each_check_has_its_own_flag(name: str, check: int) -> None:
    layouts = sharing_layouts()
    bench, engine = Bench(layouts, SHARING_POOLS), plain_engine(layouts, SHARING_POOLS, seed=2)
    step = engine.step()
    while not step.requests or not step.num_blocks_of_row[0, 1]:
        step = engine.step()
    step = copy_of(step)
    match name:
        case "row":
            step.num_blocks_of_row[0, 1] += 90
        case "column":
            step.block_tables[1][0, -1] = 5
        case "owner":
            step.ref_counts[1][step.block_tables[1][0, 0]] = 0
        case "slot":
            step.slot_mappings[1, 0] = step.slot_mappings[1, 0] ^ 1
        case "given":
            step.ref_blocks[1][0, 0] += 1

    found = bench.kernel.detect(bench.read(step, with_refs=True))

    assert found[1].tolist()[check]
    assert_same_verdict(bench, step, with_refs=True, seed=0)


@pytest.mark.fast
def test_launches_do_not_see_each_others_claims() -> None:
    layouts = sharing_layouts()
    bench, engine = Bench(layouts, SHARING_POOLS), plain_engine(layouts, SHARING_POOLS, seed=2)
    for _ in range(8):
        assert not bench.kernel.detect(bench.read(engine.step(), with_refs=True)).any()


@pytest.mark.fast
def test_a_checked_step_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of groups."""
    layouts = hybrid_layouts()
    bench, engine = Bench(layouts, HYBRID_POOLS), plain_engine(layouts, HYBRID_POOLS, seed=2)
    counter = CountedKernel(kernel.check_step_kernel)
    monkeypatch.setattr(kernel, "check_step_kernel", counter)

    for _ in range(3):
        bench.kernel.find(bench.read(engine.step(), with_refs=True))

    assert counter.launches == 3


@pytest.mark.fast
def test_a_kernel_that_runs_out_of_launch_numbers_starts_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "MAX_LAUNCHES", 2)
    layouts = sharing_layouts()
    bench, engine = Bench(layouts, SHARING_POOLS), plain_engine(layouts, SHARING_POOLS, seed=2)
    for _ in range(6):
        assert not bench.kernel.detect(bench.read(engine.step(), with_refs=True)).any()


@pytest.mark.fast
def test_past_a_row_the_kernel_reads_as_far_as_the_row_once_reached() -> None:
    """What was null at the last launch, and lies well past every id there, is not read again."""
    layouts = hybrid_layouts()
    bench, engine = Bench(layouts, HYBRID_POOLS), plain_engine(layouts, HYBRID_POOLS, seed=4)
    step = engine.step()
    while not step.requests or step.num_blocks_of_row[0, 0] > 7:
        step = engine.step()
    assert not bench.kernel.detect(bench.read(step, with_refs=True)).any()
    grown = copy_of(step)
    grown.block_tables[0][0, -1] = 9

    unseen = bench.kernel.detect(bench.read(grown, with_refs=True))
    bench.kernel.forget()
    seen = bench.kernel.detect(bench.read(grown, with_refs=True))

    assert not unseen.any()
    assert seen.nonzero().tolist() == [[0, 1]]


@pytest.mark.fast
def test_the_detector_names_the_fault_or_says_that_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layouts = hybrid_layouts()
    bench, engine = Bench(layouts, HYBRID_POOLS), plain_engine(layouts, HYBRID_POOLS, seed=4)
    step = engine.step()
    spoilt = copy_of(step)
    spoilt.slot_mappings[0, 0] = 3
    checked = bench.read(spoilt, with_refs=True)

    named = bench.kernel.find(checked)
    monkeypatch.setattr(kernel, "find_faults", lambda *_: [])
    gone = bench.kernel.find(checked)

    assert named
    assert gone is None


SIGNATURE = {
    "groups_ptr": "*i64",
    "seq_lens_ptr": "*i32",
    "starts_ptr": "*i32",
    "num_blocks_ptr": "*i32",
    "num_blocks_row_stride": "i32",
    "num_blocks_group_stride": "i32",
    "marks_ptr": "*i32",
    "marks_group_stride": "i32",
    "claims_ptr": "*i64",
    "found_ptr": "*i64",
    "num_reqs": "i32",
    "num_rows": "i32",
    "num_starts": "i32",
    "num_slots": "i32",
    "num_tiles": "i32",
    "launch": "i32",
}


def test_the_kernel_compiles_for_gpus_without_spills() -> None:
    """With all that may be given to it, and with nothing of that."""
    sizes = {"SEARCH_STEPS": 9, "COLUMN_TILE": 512, "TOKEN_TILE": 128}
    choices = ["HAS_REFS", "HAS_GIVEN", "UNTOUCHED", "SHARED_WRITES"]
    where = "bt_tables.sanitizer.kernel:check_step_kernel"
    uses = [
        KernelUse(f"{given}", where, SIGNATURE, {**dict.fromkeys(choices, given), **sizes})
        for given in (0, 1)
    ]

    resources = compile_resources(uses)

    for found in resources.values():
        assert [usage.architecture for usage in found] == [80, 90, 100]
        assert all(usage.spills == usage.stack == 0 for usage in found)
    assert len(resources) == 2
