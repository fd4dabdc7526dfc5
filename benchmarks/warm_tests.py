"""Runs pytest again and again in processes that have imported already what takes long."""

import importlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

# Nothing of a package: what is imported here is not imported anew from a run's own folder.
PRELOADED = ["hypothesis.stateful", "numpy", "torch", "triton.language"]


class WarmTests:
    """Forks each run; it knows nothing of what the tests are for."""

    def __init__(self) -> None:
        """Import what the runs share."""
        # Triton's own library reads it when it is first imported
        os.environ["TRITON_INTERPRET"] = "1"
        for name in PRELOADED:
            importlib.import_module(name)
        self._context = multiprocessing.get_context("fork")

    def exit_code(self, folder: Path, arguments: Sequence[str], seconds: int) -> int:
        """Run the tests in ``folder``; what they print is in ``output.txt``.

        Args:
            folder: A copy of the tree.
            arguments: Pytest's.
            seconds: What the run may take of a processor, whatever else is busy. One that
                only waits may wait ten times as long.

        Returns:
            Pytest's exit code, or minus the signal that ended the run.
        """
        run = self._context.Process(target=_run, args=(folder, list(arguments), seconds))
        run.start()
        run.join(10 * seconds)
        if run.is_alive() and run.pid:
            os.killpg(run.pid, signal.SIGKILL)
            run.join()
        return run.exitcode or 0


def _run(folder: Path, arguments: list[str], seconds: int) -> None:
    # a group of its own, which ends with all that the tests started
    os.setsid()
    # SIGXCPU, which ends the run
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    with (folder / "output.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(folder)
    sys.dont_write_bytecode = True
    paths = [str(folder), *map(str, sorted(folder.glob("packages/*/src")))]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(paths[1:])
    sys.stdout.flush()
    os._exit(pytest.main(arguments))
