"""Break a package on purpose, one small change at a time, and list what its tests do not notice.

cosmic-ray makes the changes, each in a copy under ``mutants/``, never in the tree itself. A run
that is stopped goes on where it was; one whose sources or tests have changed begins anew.
"""

import argparse
import ast
import hashlib
import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from benchmarks.warm_tests import WarmTests
from cosmic_ray.mutating import use_mutation  # type: ignore[import-not-found]  # there in the mutants environment alone
from cosmic_ray.plugins import get_operator  # type: ignore[import-not-found]  # there in the mutants environment alone
from cosmic_ray.work_db import use_db  # type: ignore[import-not-found]  # there in the mutants environment alone
from cosmic_ray.work_item import (  # type: ignore[import-not-found]  # there in the mutants environment alone
    TestOutcome,
    WorkerOutcome,
    WorkResult,
)

ROOT = Path(__file__).parents[1]
SKIP = "INSERT INTO work_results (job_id, worker_outcome) VALUES (?, 'SKIPPED')"
MUTANTS = """SELECT job_id, operator_name, start_pos_row, start_pos_col FROM mutation_specs
             ORDER BY operator_name, occurrence"""
RESULTS = """SELECT test_outcome, worker_outcome, diff FROM work_results
             WHERE worker_outcome != 'SKIPPED'"""

PACKAGES = ["bt_width", "bt_tables", "bt_builders", "bt_runner"]
# cosmic-ray asks for a command, which nothing here runs.
SETTINGS = ["timeout = 1", "excluded-modules = []", 'test-command = "false"']
SETTINGS += ["[cosmic-ray.distributor]", 'name = "local"']
OPTIONS = ["-x", "-q", "-m", "fast", "--assert=plain", "--hypothesis-seed=0"]
OPTIONS += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "tests.support.no_shrinking"]

Position = tuple[int, int]
Span = tuple[Position, Position]


@dataclass(frozen=True)
class Workplace:
    """One source file's copy of the tree, in which nothing else is changed.

    Attributes:
        package: The import name of the package.
        module: The file, relative to the package.
        seconds: A change with which the tests take more of a processor counts as noticed.
    """

    package: str
    module: str
    seconds: int

    @property
    def folder(self) -> Path:
        return ROOT / "mutants" / self.package / self.module.replace("/", ".")

    @property
    def session(self) -> Path:
        return self.folder / "session.sqlite"

    @property
    def source(self) -> Path:
        """Where the changed file stands, relative to the copy and to the tree alike."""
        distribution = self.package.replace("_", "-")
        return Path("packages") / distribution / "src" / self.package / self.module

    def prepare(self) -> None:
        """Copy what is tested, and list every change, unless that was done for these files."""
        files = [ROOT / "pytest.ini", ROOT / "tests" / "conftest.py"]
        packages = PACKAGES[: PACKAGES.index(self.package) + 1]
        folders = [f"packages/{name.replace('_', '-')}/src" for name in packages]
        for folder in (*folders, f"tests/{self.package}", "tests/support"):
            files += sorted((ROOT / folder).rglob("*.py"))
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
        mark = self.folder / "digest"
        if mark.exists() and mark.read_text() == digest:
            # a run that was stopped may have left a change
            shutil.copy(ROOT / self.source, self.folder / self.source)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in files:
            copy = self.folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        settings = [f"module-path = {json.dumps(str(self.source))}", *SETTINGS]
        (self.folder / "settings.toml").write_text("\n".join(["[cosmic-ray]", *settings]))
        command = [sys.executable, "-m", "cosmic_ray.cli", "init", "settings.toml"]
        subprocess.run([*command, self.session.name], cwd=self.folder, check=True)
        mark.write_text(digest)

    def time_tests(self, warm: WarmTests) -> Mapping[Path, float]:
        """The seconds that each file of tests takes when nothing is changed."""
        options = ["--junit-xml=times.xml", "-o", "junit_duration_report=total"]
        arguments = [*OPTIONS, *options, f"tests/{self.package}"]
        if warm.exit_code(self.folder, arguments, self.seconds):
            print((self.folder / "output.txt").read_text())
            # tests that fail anyway would notice everything
            sys.exit(f"the fast tests of {self.package} fail as they are: mend them first")
        seconds: dict[Path, float] = defaultdict(float)
        for test in ElementTree.parse(self.folder / "times.xml").iter("testcase"):
            # a file that skips itself has no class
            if test.attrib["classname"]:
                path = Path(test.attrib["classname"].replace(".", "/")).with_suffix(".py")
                seconds[path] += float(test.attrib["time"])
        return seconds

    def run(self, warm: WarmTests, seconds: Mapping[Path, float]) -> None:
        """Try every change that waits, on the likeliest tests first and then on the quickest."""
        names = Path(self.module).with_suffix("").parts

        def may_wait(test: Path) -> tuple[bool, float]:
            is_near = test.stem.removeprefix("test_") in names or test.parent.name in names
            return not is_near, seconds[test]

        arguments = [*OPTIONS, *map(str, sorted(seconds, key=may_wait))]
        source = self.folder / self.source
        with use_db(self.session) as database:
            for item in list(database.pending_work_items):
                (mutation,) = item.mutations
                operator = get_operator(mutation.operator_name)(**mutation.operator_args)
                with use_mutation(source, operator, mutation.occurrence) as (before, after):
                    code = warm.exit_code(self.folder, arguments, self.seconds)
                result = WorkResult(
                    # abnormal is what a signal ended: no test failed
                    worker_outcome=WorkerOutcome.NORMAL if code >= 0 else WorkerOutcome.ABNORMAL,
                    output=(self.folder / "output.txt").read_text(errors="replace"),
                    test_outcome=TestOutcome.KILLED if code else TestOutcome.SURVIVED,
                    diff="\n".join(self._diff(before, after)),
                )
                database.set_result(item.job_id, result)

    def _diff(self, before: str, after: str) -> Iterator[str]:
        lines = before.splitlines(), after.splitlines()
        return unified_diff(*lines, str(self.source), str(self.source), lineterm="")


class Mutant(NamedTuple):
    """One change, by the session that lists it."""

    session: Path
    job_id: str


def real_mutants(workplace: Workplace, *, host_only: bool) -> Iterator[Mutant]:
    """Changes that are changes: no annotation, which is never evaluated, and no bare ``*``."""
    tree = ast.parse((ROOT / workplace.source).read_text(encoding="utf-8"))
    excluded = [*_annotations(tree), *(_kernels(tree) if host_only else ())]
    operators = [
        ((node.left.end_lineno or 0, node.left.end_col_offset or 0), _start(node.right))
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
    ]
    with sqlite3.connect(workplace.session) as session:
        for job_id, operator, row, column in session.execute(MUTANTS):
            at = (row, column)
            is_operator = "BinaryOperator" not in operator or _is_in(at, operators)
            if is_operator and not _is_in(at, excluded):
                yield Mutant(workplace.session, job_id)


def _annotations(tree: ast.Module) -> Iterator[Span]:
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            found = getattr(node, name, None)
            if isinstance(found, ast.expr):
                yield _start(found), (found.end_lineno or 0, found.end_col_offset or 0)


def _kernels(tree: ast.Module) -> Iterator[Span]:
    """What runs on the device: functions under ``@jit``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        calls = [getattr(decorator, "func", decorator) for decorator in node.decorator_list]
        if any(isinstance(call, ast.Name) and call.id == "jit" for call in calls):
            first = node.decorator_list[0].lineno, 0  # its @ is no part of it
            yield first, (node.end_lineno or 0, node.end_col_offset or 0)


def _start(node: ast.expr) -> Position:
    return node.lineno, node.col_offset


def _is_in(at: Position, spans: Sequence[Span]) -> bool:
    return any(start <= at < end for start, end in spans)


def skip_all_but(chosen: set[Mutant], workplaces: Sequence[Workplace]) -> None:
    """Take the others out of every session; those tried before keep their result."""
    for workplace in workplaces:
        with sqlite3.connect(workplace.session) as session:
            session.execute("DELETE FROM work_results WHERE worker_outcome = 'SKIPPED'")
            tried = {job_id for (job_id,) in session.execute("SELECT job_id FROM work_results")}
            waiting = [job_id for job_id, *_ in session.execute(MUTANTS) if job_id not in tried]
            others = [j for j in waiting if Mutant(workplace.session, j) not in chosen]
            session.executemany(SKIP, [(job_id,) for job_id in others])


def report(workplaces: Sequence[Workplace]) -> None:
    """Print what survived, then a line per file."""
    total = caught = ended = 0
    for workplace in workplaces:
        with sqlite3.connect(workplace.session) as session:
            results = session.execute(RESULTS).fetchall()
        survivors = [diff for outcome, _, diff in results if outcome == "SURVIVED"]
        for diff in survivors:
            print(diff, end="\n\n")
        total += len(results)
        caught += len(results) - len(survivors)
        ended += sum(worker == "ABNORMAL" for _, worker, _ in results)
        print(f"{workplace.module}: {len(results) - len(survivors)} of {len(results)} caught\n")
    share = f"{100 * caught / max(total, 1):.1f} %"
    print(f"{caught} of {total} caught: {share}, {ended} by a crash or the time they took")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="import name, such as bt_width")
    parser.add_argument("--exclude", nargs="*", default=[], help="files to leave alone")
    parser.add_argument("--host-only", action="store_true", help="leave kernels alone")
    parser.add_argument("--sample", type=int, help="so many changes only, chosen by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--timeout", type=int, default=60, help="seconds of one test run")
    args = parser.parse_args()

    source = ROOT / "packages" / args.package.replace("_", "-") / "src" / args.package
    modules = [str(path.relative_to(source)) for path in sorted(source.rglob("*.py"))]
    workplaces = [
        Workplace(args.package, module, args.timeout)
        for module in modules
        if module not in args.exclude
    ]
    for workplace in workplaces:
        workplace.prepare()
    mutants = [
        mutant
        for workplace in workplaces
        for mutant in real_mutants(workplace, host_only=args.host_only)
    ]
    random.Random(args.seed).shuffle(mutants)
    skip_all_but(set(mutants[: args.sample]), workplaces)
    warm = WarmTests()
    seconds = workplaces[0].time_tests(warm)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda workplace: workplace.run(warm, seconds), workplaces))
    report(workplaces)


if __name__ == "__main__":
    main()
