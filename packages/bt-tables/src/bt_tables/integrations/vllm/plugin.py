"""The plugin that vLLM loads: puts the checks between its tables and its model.

Whatever goes wrong here is one sentence in vLLM's log, and the engine runs on unchecked; only a
finding may end it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from bt_tables.sanitizer import BlockTableFaultError

from .layouts import NotCheckedError
from .runner_check import RunnerCheck, logger
from .runners import make_check_v1, make_check_v2, step_v1, step_v2
from .settings import Settings, read_settings

TESTED_VERSIONS = ("0.33",)
"""The versions of vLLM whose runners are known here, without their patch numbers."""

_CHECK = "_bt_tables_check"
_MARK = "_bt_tables_patched"


def register() -> None:
    """Put the checks into vLLM's model runners where ``BT_SANITIZE=1`` asks for them.

    vLLM calls it in each of its processes, as an entry point of ``vllm.general_plugins``.
    """
    try:
        settings = read_settings(os.environ)
        if settings is None:
            return
        _require_version()
        patches: dict[str, Callable[[Any], None]] = {
            "vllm.v1.worker.gpu.model_runner": lambda module: patch_v2(
                module.GPUModelRunner, settings
            ),
            "vllm.v1.worker.gpu_model_runner": lambda module: patch_v1(
                module.GPUModelRunner, settings
            ),
        }
        for name in [name for name in patches if name in sys.modules]:
            patches.pop(name)(sys.modules[name])
        if not any(isinstance(finder, _PatchOnImport) for finder in sys.meta_path):
            sys.meta_path.insert(0, _PatchOnImport(patches))
    except Exception as error:
        logger.warning("Block tables are not checked: %s", error)


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Patches a module right after its first import.

    vLLM loads plugins in every process, also in those that have no runner and must not pay for one.
    """

    def __init__(self, patches: dict[str, Callable[[Any], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that others find, with the patch after its loading."""
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                try:
                    patch(module)
                except Exception as error:
                    logger.warning("Block tables are not checked: %s", error)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader alone
        return spec


def _require_version() -> None:
    version = importlib.metadata.version("vllm")
    if not any(version == tested or version.startswith(f"{tested}.") for tested in TESTED_VERSIONS):
        raise NotCheckedError(
            f"vLLM {version} is none of the tested versions {', '.join(TESTED_VERSIONS)}"
        )


def patch_v2(runner_class: Any, settings: Settings) -> None:
    """Check what MRV2's ``prepare_attn`` returns."""
    if _is_patched(runner_class, "initialize_kv_cache", "execute_model", "prepare_attn"):
        return
    execute, prepare = runner_class.execute_model, runner_class.prepare_attn

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_dummy(args, kwargs):
            _with_check(self, lambda check: check.follow(scheduler_output))
        return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        prepared = prepare(self, input_batch)
        _with_check(self, lambda check: check.check(step_v2(prepared[0], prepared[1], input_batch)))
        return prepared

    _patch_start(runner_class, lambda runner: make_check_v2(runner, settings))
    runner_class.execute_model = execute_model
    runner_class.prepare_attn = prepare_attn


def patch_v1(runner_class: Any, settings: Settings) -> None:
    """Check what MRV1 hands to its metadata builders in a step that the scheduler asked for."""
    if _is_patched(
        runner_class, "initialize_kv_cache", "_update_states", "_build_attention_metadata"
    ):
        return
    update, build = runner_class._update_states, runner_class._build_attention_metadata

    @functools.wraps(update)
    def _update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        _with_check(self, lambda check: check.follow(scheduler_output))
        return update(self, scheduler_output, *args, **kwargs)

    @functools.wraps(build)
    def _build_attention_metadata(self: Any, *args: Any, **kwargs: Any) -> Any:
        # it nulls the rows above the batch, so the tables are ready after it
        result = build(self, *args, **kwargs)
        slots = kwargs.get("slot_mappings")
        # dummy runs and captures say nothing of what was scheduled
        if slots is not None and kwargs.get("num_scheduled_tokens") is not None:
            rows = kwargs.get("num_reqs_padded") or kwargs["num_reqs"]
            _with_check(self, lambda check: check.check(step_v1(self, rows, slots)))
        return result

    _patch_start(runner_class, lambda runner: make_check_v1(runner, settings))
    runner_class._update_states = _update_states
    runner_class._build_attention_metadata = _build_attention_metadata


def _patch_start(runner_class: Any, make_check: Callable[[Any], RunnerCheck]) -> None:
    """Make the checks of a runner when it has made its tables, and mark the class as patched."""
    make = runner_class.initialize_kv_cache

    @functools.wraps(make)
    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self, _CHECK, None)
        result = make(self, *args, **kwargs)
        _guarded(self, lambda: setattr(self, _CHECK, make_check(self)))
        return result

    runner_class.initialize_kv_cache = initialize_kv_cache
    setattr(runner_class, _MARK, True)


def _is_patched(runner_class: Any, *names: str) -> bool:
    missing = [name for name in names if not callable(getattr(runner_class, name, None))]
    if missing:
        raise NotCheckedError(f"{runner_class.__name__} has no {', '.join(missing)}")
    return bool(getattr(runner_class, _MARK, False))


def _is_dummy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # execute_model(scheduler_output, intermediate_tensors, dummy_run, ...)
    return bool(args[1] if len(args) > 1 else kwargs.get("dummy_run", False))


def _with_check(runner: Any, work: Callable[[RunnerCheck], None]) -> None:
    check: RunnerCheck | None = getattr(runner, _CHECK, None)
    if check is not None:
        _guarded(runner, lambda: work(check))


def _guarded(runner: Any, work: Callable[[], None]) -> None:
    """Do it; a finding may end the engine, any other error ends the checks alone."""
    try:
        work()
    except BlockTableFaultError:
        raise
    except NotCheckedError as error:
        logger.warning("Block tables are not checked: %s", error)
    except Exception:
        setattr(runner, _CHECK, None)
        logger.exception(
            "Block tables are not checked any more. This is a fault of bt_tables and says nothing "
            "of vLLM's tables; please report it."
        )
