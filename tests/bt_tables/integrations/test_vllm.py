"""The plugin for vLLM over small stand-ins that have the attributes of vLLM's classes."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bt_tables.integrations.vllm import plugin, register
from bt_tables.integrations.vllm.given_blocks import GivenBlocks
from bt_tables.integrations.vllm.layouts import plan_groups
from bt_tables.integrations.vllm.settings import Settings, read_settings
from bt_tables.sanitizer import BlockTableFaultError, FaultKind
from bt_width import ContextParallel, InvalidSpecError, ServingLimits

pytestmark = pytest.mark.fast


@dataclass
class KVCacheSpec:
    """What a runner asks any spec."""

    block_size: int = 16
    dcp_sharded: bool = False
    block_table_token_alignment: int | None = 128

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return -(-max_len // self.block_size)


@dataclass
class AttentionSpec(KVCacheSpec):
    dcp_sharded: bool = True


class FullAttentionSpec(AttentionSpec):
    pass


@dataclass
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 40
    extra_retained_tokens: int = 0


@dataclass
class CircularBufferSpec(AttentionSpec):
    block_table_token_alignment: int | None = None


@dataclass
class MambaSpec(KVCacheSpec):
    mamba_cache_mode: str = "align"
    num_speculative_blocks: int = 0
    block_table_token_alignment: int | None = None


class CrossAttentionSpec(AttentionSpec):
    pass


@dataclass
class UniformTypeKVCacheSpecs(KVCacheSpec):
    first_spec: Any = None


class NewKindOfSpec(KVCacheSpec):
    pass


def output(
    *,
    new: Sequence[tuple[str, list[list[int]], int]] = (),
    cached: Sequence[tuple[str, list[list[int]] | None, int]] = (),
    finished: Sequence[str] = (),
    preempted: Sequence[str] = (),
    resumed: Sequence[str] = (),
    drafts: Mapping[str, list[int]] | None = None,
) -> Any:
    """Return what a scheduler says of one step."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=blocks, num_computed_tokens=computed)
            for name, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            new_block_ids=[blocks for _, blocks, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            resumed_req_ids=set(resumed),
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
        scheduled_spec_decode_tokens=dict(drafts or {}),
    )


@dataclass
class Batch:
    """MRV2's ``InputBatch``: one request of 20 tokens, of which four are new."""

    req_ids: list[str] = field(default_factory=lambda: ["a"])
    seq_lens: torch.Tensor = field(default_factory=lambda: torch.tensor([20], dtype=torch.int32))
    query_start_loc: torch.Tensor = field(
        default_factory=lambda: torch.tensor([0, 4], dtype=torch.int32)
    )


FIRST = output(new=[("a", [[5, 7]], 16)])


def runner_class() -> Any:
    """Return a new class with the methods and attributes of MRV2's runner."""

    class GPUModelRunner:
        max_model_len, max_num_reqs, max_num_tokens = 64, 2, 8
        dcp_size, dcp_rank, cp_interleave = 1, 0, 1
        pcp_manager = None
        is_encoder_decoder = False
        vllm_config = None

        def initialize_kv_cache(self, config: Any) -> None:
            self.kv_cache_config = config
            self.attn_groups: list[Any] = []
            self.block_tables = SimpleNamespace(
                input_block_tables=[torch.zeros(2, 8, dtype=torch.int32)]
            )
            self.slots = torch.full((1, 8), -1)

        def prepare_attn(self, batch: Any) -> Any:
            (table,) = self.block_tables.input_block_tables
            table[0, :2] = torch.tensor([5, 7])
            self.slots[0, :4] = 7 * 16 + torch.arange(4)
            return (table[:1],), self.slots[:, :5]

        def execute_model(self, scheduler_output: Any, dummy: Any = None) -> str:
            self.prepare_attn(Batch())
            return "computed"

    return GPUModelRunner


CONFIG = SimpleNamespace(
    num_blocks=20, kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())]
)


def started(runner_type: Any, **settings: Any) -> Any:
    plugin.patch_v2(runner_type, Settings(**settings))
    runner = runner_type()
    runner.initialize_kv_cache(CONFIG)
    return runner


def test_a_sound_step_passes_and_is_counted() -> None:
    runner = started(runner_class())

    assert runner.execute_model(FIRST) == "computed"

    assert runner._bt_tables_check is not None
    assert runner._bt_tables_check._step == 1


def batch_order_runner_class() -> Any:
    """Return a new class with the methods and attributes of MRV1's runner."""

    class Table:
        pcp_world_size, dcp_world_size, dcp_rank, cp_kv_cache_interleave_size = 1, 1, 0, 1

        def __init__(self, mode: str) -> None:
            self.block_table = SimpleNamespace(gpu=torch.zeros(2, 8, dtype=torch.int32))
            self.slot_mapping_mode = SimpleNamespace(value=mode)

        def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
            table: torch.Tensor = self.block_table.gpu
            return table[:num_reqs]

    class GPUModelRunner:
        max_model_len, max_num_reqs, max_num_tokens = 64, 2, 8
        max_encoder_len = 0
        vllm_config = None

        def initialize_kv_cache(self, config: Any) -> None:
            self.kv_cache_config = config
            self.attn_groups: list[Any] = []
            tables = [Table("token_to_kv_slot"), Table("none")]
            tables[1].block_table.gpu = torch.zeros(2, 4, dtype=torch.int32)
            self.input_batch = SimpleNamespace(
                block_table=SimpleNamespace(block_tables=tables), num_reqs=1, req_ids=["a", "old"]
            )
            self.seq_lens = torch.tensor([20, 0], dtype=torch.int32)
            self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 4, 4], dtype=torch.int32))
            self.slots = torch.full((8,), -1)

        def _update_states(self, scheduler_output: Any) -> None: ...

        def _build_attention_metadata(self, **arguments: Any) -> str:
            first, second = self.input_batch.block_table.block_tables
            first.block_table.gpu[0, :2] = torch.tensor([5, 7])
            second.block_table.gpu[0, :2] = torch.tensor([3, 9])
            return "built"

        def run(self, output: Any, padded: int = 5) -> str:
            self._update_states(output)
            slots = self.slots[:padded]
            slots[:4] = 7 * 16 + torch.arange(4)
            return self._build_attention_metadata(
                num_reqs=1,
                num_reqs_padded=None,
                num_scheduled_tokens={"a": 4},
                # the slots of a group of states are never written
                slot_mappings={0: slots, 1: torch.zeros(5, dtype=torch.int64)},
            )

    return GPUModelRunner


def started_in_batch_order() -> Any:
    runner_type = batch_order_runner_class()
    plugin.patch_v1(runner_type, Settings())
    runner = runner_type()
    specs = (FullAttentionSpec(), MambaSpec())
    runner.initialize_kv_cache(
        SimpleNamespace(
            num_blocks=20, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
        )
    )
    return runner


def test_a_sound_step_in_batch_order_passes_and_is_counted() -> None:
    runner = started_in_batch_order()

    assert runner.run(output(new=[("a", [[5, 7], [3, 9]], 16)])) == "built"

    assert runner._bt_tables_check is not None
    assert runner._bt_tables_check._step == 1


def test_a_group_without_slots_does_not_move_where_the_padding_changes() -> None:
    """The slots that stand for none are those of captured graphs, too."""
    runner = started_in_batch_order()
    given = output(new=[("a", [[5, 7], [3, 9]], 16)])

    assert [runner.run(given, padded) for padded in (5, 8, 4)] == ["built"] * 3


def test_a_wrong_row_in_batch_order_ends_the_step() -> None:
    runner = started_in_batch_order()

    with pytest.raises(BlockTableFaultError, match=r"wrong-block.*group 1, request 'a'.*column 1"):
        runner.run(output(new=[("a", [[5, 7], [3, 8]], 16)]))


def test_a_row_that_the_scheduler_did_not_give_ends_the_step(tmp_path: Path) -> None:
    runner = started(runner_class(), directory=tmp_path)

    with pytest.raises(BlockTableFaultError, match=r"wrong-block.*request 'a'.*expected 6"):
        runner.execute_model(output(new=[("a", [[6, 7]], 16)]))

    (page,) = tmp_path.glob("*.html")
    assert "scheduler output 1 given group 0: 6, 7" in page.read_text(encoding="utf-8")


def test_with_log_the_engine_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    runner = started(runner_class(), action="log")

    assert runner.execute_model(output(new=[("a", [[6, 7]], 16)])) == "computed"

    assert "wrong-block" in caplog.text


def test_only_every_nth_step_is_checked() -> None:
    runner = started(runner_class(), every=3)
    runner.execute_model(FIRST)
    wrong = output(cached=[("a", [[9]], 16)])

    # the row now lacks block 9, and the block of the last token is still there
    runner.execute_model(wrong)
    runner.execute_model(output(new=[("a", [[6, 7]], 16)]))
    with pytest.raises(BlockTableFaultError):
        runner.execute_model(output(new=[("a", [[6, 7]], 16)]))


def test_a_table_of_another_width_is_found_with_both_derivations() -> None:
    runner_type = runner_class()
    make = runner_type.initialize_kv_cache

    def narrow(self: Any, config: Any) -> None:
        make(self, config)
        self.block_tables.input_block_tables = [torch.zeros(2, 7, dtype=torch.int32)]

    runner_type.initialize_kv_cache = narrow

    with pytest.raises(BlockTableFaultError) as raised:
        started(runner_type)

    (finding,) = raised.value.report.findings
    assert finding.kind is FaultKind.WIDTH
    assert "7 columns (vLLM: FullAttentionSpec.max_num_blocks_per_req(64) is 4" in finding.text
    assert "= 8 columns" in finding.text


def test_a_table_of_kernel_blocks_of_another_width_is_found() -> None:
    runner_type = runner_class()
    make = runner_type.initialize_kv_cache

    def with_split(self: Any, config: Any) -> None:
        make(self, config)
        table = torch.zeros(1, 2, 12, dtype=torch.int32)
        self.attn_groups = [[SimpleNamespace(kernel_block_size=8, kernel_block_table=table)]]

    runner_type.initialize_kv_cache = with_split

    with pytest.raises(BlockTableFaultError, match="12 columns of kernel blocks of 8 tokens"):
        started(runner_type)


@pytest.mark.parametrize("action", ["raise", "log"])
def test_an_error_of_the_checks_says_whose_fault_it_is_and_never_ends_the_engine(
    caplog: pytest.LogCaptureFixture, action: str
) -> None:
    runner = started(runner_class(), action=action)

    assert runner.execute_model(SimpleNamespace()) == "computed"
    assert runner.execute_model(FIRST) == "computed"

    assert runner._bt_tables_check is None
    (message,) = caplog.messages
    assert "This is a fault of bt_tables and says nothing of vLLM's tables" in message
    assert "AttributeError" in caplog.text


@pytest.mark.parametrize("action", ["raise", "log"])
def test_a_runner_that_cannot_be_checked_is_one_sentence(
    caplog: pytest.LogCaptureFixture, action: str
) -> None:
    runner_type = runner_class()
    runner_type.pcp_manager = object()

    runner = started(runner_type, action=action)

    assert runner.execute_model(FIRST) == "computed"
    assert caplog.messages == [
        "Block tables are not checked: prefill context parallelism has tables of its own"
    ]


def test_a_runner_without_a_method_that_is_patched_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="Runner has no initialize_kv_cache"):
        plugin.patch_v2(type("Runner", (), {}), Settings())


def test_a_class_is_patched_once() -> None:
    runner_type = runner_class()
    runner = started(runner_type)
    plugin.patch_v2(runner_type, Settings())

    runner.execute_model(FIRST)

    assert runner._bt_tables_check._step == 1


def test_a_block_that_two_requests_hold_and_one_writes_is_found() -> None:
    """The other one need not be in the batch."""
    runner = started(runner_class())
    both = output(new=[("a", [[5, 7]], 16), ("b", [[4, 7]], 20)])

    with pytest.raises(BlockTableFaultError, match=r"shared-write.*'b'.*found 7.*'a' has it too"):
        runner.execute_model(both)


def test_a_prefix_that_is_computed_in_the_step_may_be_hit_in_it() -> None:
    """vLLM finds a block from the moment on that its request is scheduled."""
    runner = started(runner_class())
    hit = output(new=[("a", [[5, 7]], 16), ("b", [[5, 7, 8]], 32)])

    assert runner.execute_model(hit) == "computed"


def test_a_request_from_before_the_checks_is_not_judged() -> None:
    runner = started(runner_class())

    assert runner.execute_model(output(cached=[("a", [[9]], 16)])) == "computed"


@pytest.mark.parametrize(
    ("spec", "kind", "width"),
    [
        (FullAttentionSpec(), "attention", 8),
        (FullAttentionSpec(block_table_token_alignment=None), "attention", 4),
        (SlidingWindowSpec(dcp_sharded=False), "window", 8),
        (MambaSpec(num_speculative_blocks=2), "mamba", 6),
        (MambaSpec(mamba_cache_mode="none", num_speculative_blocks=2), "mamba", 3),
        (CircularBufferSpec(), "mamba", 1),
        (UniformTypeKVCacheSpecs(first_spec=SlidingWindowSpec()), "window", 8),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_a_spec_is_planned_as_vllm_plans_it(spec: Any, kind: str, width: int) -> None:
    limits = ServingLimits(max_model_len=64, max_num_reqs=2, max_num_batched_tokens=8)

    (group,), left_out = plan_groups([SimpleNamespace(kv_cache_spec=spec)], limits)

    assert not left_out
    assert (group.layout.kind, group.layout.width) == (kind, width)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (CrossAttentionSpec(), "cross-attention tables are as long"),
        (NewKindOfSpec(), "NewKindOfSpec is a kind of cache that is not known here"),
        (SlidingWindowSpec(), "a window is not sharded"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVCacheSpec) else "",
)
def test_a_group_that_cannot_be_checked_is_left_out_by_name(spec: Any, words: str) -> None:
    limits = ServingLimits(
        max_model_len=64,
        max_num_reqs=2,
        max_num_batched_tokens=8,
        context_parallel=ContextParallel(size=2),
    )
    groups = [SimpleNamespace(kv_cache_spec=each) for each in (spec, FullAttentionSpec())]

    (group,), (sentence,) = plan_groups(groups, limits)

    assert group.index == 1
    assert sentence.startswith("group 0 is not checked: ")
    assert words in sentence


def given_blocks(spec: Any) -> GivenBlocks:
    limits = ServingLimits(max_model_len=64, max_num_reqs=2, max_num_batched_tokens=8)
    groups, _ = plan_groups([SimpleNamespace(kv_cache_spec=spec)], limits)
    return GivenBlocks(groups, 20)


def test_given_blocks_follow_every_output() -> None:
    given = given_blocks(FullAttentionSpec())
    blocks = [[5]]

    given.follow(output(new=[("a", blocks, 0), ("b", [[5, 6]], 16)]))
    given.follow(output(cached=[("a", [[7]], 16), ("b", None, 17)]))
    # vLLM goes on to use the lists that it handed out
    blocks[0].append(99)

    assert given.rows(["b", "a"])[0].tolist() == [[5, 6], [5, 7]]
    assert given.counts(["a"]).tolist() == [[2]]
    assert given.holders().nonzero()[:, 0].tolist() == [5, 6, 7]
    assert given.holders()[5] == 2

    given.follow(output(preempted=["b"], cached=[("a", [[8]], 32)], resumed=["a"]))
    assert not given.knows(["b"])
    assert given.rows(["a"])[0].tolist() == [[8]]

    given.follow(output(finished=["a"]))
    assert not given.holders().any()


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        (FullAttentionSpec(), [1, 2, 3, 4]),
        (SlidingWindowSpec(dcp_sharded=False, sliding_window=17), [3, 4]),
        (MambaSpec(), [3, 4]),
    ],
    ids=["full", "window", "states"],
)
def test_blocks_that_no_later_step_reads_are_taken_for_given_back(
    spec: Any, held: list[int]
) -> None:
    given = given_blocks(spec)

    given.follow(output(new=[("a", [[1, 2, 3, 4]], 48)]))

    assert given.holders().nonzero()[:, 0].tolist() == held


def test_drafts_that_may_be_rejected_are_not_taken_for_computed() -> None:
    """An asynchronous scheduler counts them before it knows; the window then moves too early."""
    given = given_blocks(SlidingWindowSpec(dcp_sharded=False, sliding_window=17))
    given.follow(output(new=[("a", [[1, 2, 3, 4]], 30)], drafts={"a": [-1, -1]}))

    given.follow(output(cached=[("a", None, 33)]))
    held = given.holders().nonzero()[:, 0].tolist()
    given.follow(output(cached=[("a", None, 33)]))

    assert held == [1, 2, 3, 4]
    assert given.holders().nonzero()[:, 0].tolist() == [2, 3, 4]


def test_a_block_that_accepted_drafts_have_filled_is_not_written_again() -> None:
    """Another request may then write the tokens that it shares."""
    given = given_blocks(FullAttentionSpec())
    given.follow(output(new=[("a", [[5, 7]], 30)], drafts={"a": [8, 9]}))

    given.follow(output(cached=[("a", None, 32)], new=[("b", [[5, 7]], 16)]))

    assert not list(given.written_twice(["a", "b"]))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"BT_SANITIZE": "yes"}, "BT_SANITIZE must be 0 or 1, not 'yes'"),
        ({"BT_SANITIZE": "1", "BT_SANITIZE_EVERY": "0"}, "at least 1, not '0'"),
        ({"BT_SANITIZE": "1", "BT_SANITIZE_EVERY": "9" * 5000}, "BT_SANITIZE_EVERY"),
        ({"BT_SANITIZE": "1", "BT_SANITIZE_ACTION": "warn"}, "raise or log, not 'warn'"),
    ],
    ids=["switch", "none", "huge", "action"],
)
def test_a_variable_that_means_nothing_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidSpecError, match=words):
        read_settings(environ)


def test_settings_come_from_the_environment() -> None:
    environ = {
        "BT_SANITIZE": "1",
        "BT_SANITIZE_EVERY": "8",
        "BT_SANITIZE_ACTION": "log",
        "BT_SANITIZE_DIR": "reports",
    }

    assert read_settings(environ) == Settings(every=8, action="log", directory=Path("reports"))
    assert read_settings({"BT_SANITIZE": "1"}) == Settings()
    assert read_settings({}) is None
    assert read_settings({"BT_SANITIZE": "0"}) is None


@pytest.fixture
def clean_import_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "vllm":
            del sys.modules[name]


def test_another_version_is_one_sentence_and_no_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clean_import_path: None
) -> None:
    monkeypatch.setenv("BT_SANITIZE", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.34.0")
    before = list(sys.meta_path)

    register()

    assert caplog.messages == [
        "Block tables are not checked: vLLM 0.34.0 is none of the tested versions 0.33"
    ]
    assert sys.meta_path == before


@pytest.mark.parametrize("is_imported", [True, False], ids=["imported-before", "imported-later"])
def test_the_runners_are_patched_when_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    clean_import_path: None,
    is_imported: bool,
) -> None:
    monkeypatch.setenv("BT_SANITIZE", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.0+cu130")
    name = "vllm.v1.worker.gpu.model_runner"
    for part in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.v1.worker.gpu"):
        package = ModuleType(part)
        package.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, part, package)
    (tmp_path / "model_runner.py").write_text(
        "class GPUModelRunner:\n"
        "    def initialize_kv_cache(self): ...\n"
        "    def execute_model(self): ...\n"
        "    def prepare_attn(self): ...\n",
        encoding="utf-8",
    )
    if is_imported:
        _import(name)
        register()
    else:
        register()
        _import(name)

    assert sys.modules[name].GPUModelRunner._bt_tables_patched
    assert not caplog.messages


def _import(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_a_runner_that_has_changed_is_one_sentence_at_its_import(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    clean_import_path: None,
) -> None:
    monkeypatch.setenv("BT_SANITIZE", "1")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.33.1")
    for part in ("vllm", "vllm.v1", "vllm.v1.worker"):
        package = ModuleType(part)
        package.__path__ = [str(tmp_path)]
        monkeypatch.setitem(sys.modules, part, package)
    (tmp_path / "gpu_model_runner.py").write_text("class GPUModelRunner: ...\n", encoding="utf-8")
    register()

    name = "vllm.v1.worker.gpu_model_runner"
    _import(name)

    (message,) = caplog.messages
    assert message.startswith("Block tables are not checked: GPUModelRunner has no initialize_kv")


def test_without_the_variable_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("BT_SANITIZE", raising=False)
    before = list(sys.meta_path)
    caplog.set_level(logging.DEBUG)

    register()

    assert sys.meta_path == before
    assert not caplog.messages


def test_the_plugin_imports_nothing_of_vllm() -> None:
    program = (
        "import sys; from bt_tables.integrations.vllm import register; register(); "
        "print([name for name in sys.modules if name.split('.')[0] in ('vllm', 'triton')])"
    )

    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)

    assert shown.stdout.strip() == b"[]"
