"""``hatch run soak``: traffic for as long as asked, a line a minute, and a verdict."""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time

from tests.simulator.counts import Counts
from tests.simulator.names_engine import simulate_names
from tests.simulator.scenario import (
    EVERY_KIND,
    LARGE,
    SHARED_KINDS,
    NamesScenario,
    draw_scenario,
    of_kinds,
)
from tests.simulator.simulator import Simulator
from tests.soak.resident import ResidentMemory

from bt_runner.devices import find_device
from bt_runner.errors import RunnerError
from bt_runner.terminal.options import count, measure
from bt_runner.terminal.running import one_thread
from bt_tables.sanitizer import BlockTableFaultError
from bt_width import BlockTableError

_MAX_FINDINGS = 10
_LINE_SECONDS = 60.0


def main(argv: list[str] | None = None) -> int:
    """Soak as the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument(
        "--minutes", type=measure, default=5.0, metavar="N", help="how long (default: 5)"
    )
    parser.add_argument(
        "--steps",
        type=count,
        default=200,
        metavar="STEPS",
        help="of a scenario before the next one is drawn (default: 200)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn")
    parser.add_argument(
        "--first-scenario",
        type=count,
        default=1,
        metavar="N",
        help="begin with this one, to see a finding again (default: 1)",
    )
    parser.add_argument(
        "--max-growth",
        type=measure,
        default=2.0,
        metavar="PERCENT",
        help="by which resident memory may grow after the warm-up (default: 2)",
    )
    parser.add_argument("--device", default="cpu", help="where the tables lie (default: cpu)")
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Soak and print what was seen.

    Returns:
        0, or 1 where something was found, a block was lost or memory grew.

    Raises:
        BadInputError: The device cannot be used.
    """
    with one_thread():
        soak = _Soak(args)
        soak.run(60.0 * args.minutes, args.first_scenario)
        return soak.verdict(args.max_growth)


class _Soak:
    """Two scenarios that live from beginning to end, and short ones in turn with them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._seed, self._num_steps = args.seed, args.steps
        self._device = find_device(args.device)
        self._counts = Counts()
        self._memory = ResidentMemory()
        self._began = self._told = time.monotonic()
        self._until = math.inf

    def run(self, seconds: float, first_scenario: int) -> None:
        """Soak for some time; stop early after many findings."""
        self._until = self._began + seconds
        lasting = {
            "the lasting scenario": of_kinds(EVERY_KIND, LARGE),
            "the lasting scenario with shared blocks": of_kinds(SHARED_KINDS, LARGE),
        }
        simulators = {name: self._simulator(each, name) for name, each in lasting.items()}
        for number in itertools.count(first_scenario):
            for name, scenario in lasting.items():
                if not self._try(name, simulators[name], drains=False):
                    simulators[name] = self._simulator(scenario, f"{name} from {number}")
            draw = random.Random(f"{self._seed} scenario {number}")
            drawn = self._simulator(draw_scenario(draw, LARGE), f"{number}")
            self._try(f"scenario {number}", drawn)
            self._memory.sample()
            self._tell()
            if time.monotonic() >= self._until or self._counts.num_findings >= _MAX_FINDINGS:
                break
        for name, simulator in simulators.items():
            self._try(name, simulator)

    def verdict(self, max_growth: float) -> int:
        """Print all figures; return the exit code."""
        growth = self._memory.growth_percent
        print(self._counts.to_text())
        print(f"findings     {self._counts.num_findings}")
        print(f"lost blocks  {self._counts.num_lost_blocks}")
        print(f"memory       {growth:+.2f} % after the warm-up")
        return int(self._counts.num_findings > 0 or growth > max_growth)

    def _simulator(self, scenario: NamesScenario, name: str) -> Simulator:
        self._counts.num_scenarios += 1
        draw = random.Random(f"{self._seed} traffic {name}")
        return simulate_names(scenario, self._device, draw, self._counts)

    def _try(self, name: str, simulator: Simulator, *, drains: bool = True) -> bool:
        """Run for some steps, then empty it if told; print a finding, or return True."""
        try:
            simulator.run(self._num_steps, self._until)
            if drains:
                simulator.drain(self._until)
        except (BlockTableError, BlockTableFaultError, RunnerError) as error:
            self._counts.num_findings += 1
            where = f"{name} of seed {self._seed}, step {simulator.loop.num_steps}"
            print(f"{where}: {error}", flush=True)
            return False
        return True

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= _LINE_SECONDS:
            self._told = now
            minutes, mebibytes = (now - self._began) / 60, self._memory.last / 2**20
            line = f"{minutes:.0f} min  {self._counts.to_line()}  resident {mebibytes:.1f} MiB"
            print(line, flush=True)
