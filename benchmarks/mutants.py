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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SKIP = "INSERT INTO work_results (job_id, worker_outcome) VALUES (?, 'SKIPPED')"
MUTANTS = """SELECT job_id, operator_name, start_pos_row, start_pos_col FROM mutation_specs
             ORDER BY operator_name, occurrence"""
RESULTS = """SELECT test_outcome, diff FROM work_results WHERE worker_outcome != 'SKIPPED'"""

Position = tuple[int, int]
Span = tuple[Position, Position]


@dataclass(frozen=True)
class Workplace:
    """One source file's copy of the tree, in which nothing else is changed.

    Attributes:
        package: The import name of the package.
        module: The file, relative to the package.
        seconds: After how long a change that makes the tests hang counts as noticed.
    """

    package: str
    module: str
    seconds: float

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
        """Copy the tree, and list every change, unless that was done for these very files."""
        folders = (self.source.parents[-3], Path("tests", self.package), Path("tests", "support"))
        files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
        digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
        mark = self.folder / "digest"
        is_known = mark.exists() and mark.read_text() == digest
        if not is_known:
            shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("packages", "tests"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, ignore=ignored, dirs_exist_ok=True)
        shutil.copy(ROOT / "pytest.ini", self.folder)
        if not is_known:
            (self.folder / "cosmic-ray.toml").write_text(self._settings())
            self._cosmic_ray("init", "cosmic-ray.toml", self.session.name)
            mark.write_text(digest)

    def require_passing_tests(self) -> None:
        """Try no change at all first: tests that fail anyway would notice everything."""
        try:
            self._cosmic_ray("baseline", "cosmic-ray.toml")
        except subprocess.CalledProcessError:
            sys.exit(f"the fast tests of {self.package} fail as they are: mend them first")

    def run(self) -> None:
        """Try every change that waits."""
        self._cosmic_ray("exec", "cosmic-ray.toml", self.session.name)

    def _settings(self) -> str:
        paths = sorted((self.folder / "packages").glob("*/src"))
        environment = f"PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={':'.join(map(str, paths))}"
        options = "-x -q -m fast -p no:cacheprovider -p no:randomly"
        options += " -p tests.support.no_shrinking --hypothesis-seed=0"
        tests = " ".join(map(str, self._tests()))
        command = f"env {environment} {sys.executable} -m pytest {options} {tests}"
        return "\n".join(
            [
                "[cosmic-ray]",
                f"module-path = {json.dumps(str(self.source))}",
                f"timeout = {self.seconds}",
                "excluded-modules = []",
                f"test-command = {json.dumps(command)}",
                "[cosmic-ray.distributor]",
                'name = "local"',
            ]
        )

    def _tests(self) -> list[Path]:
        """The package's tests, those first that are named after the module or its folder."""
        folder = ROOT / "tests" / self.package
        names = Path(self.module).with_suffix("").parts
        tests = {path for path in folder.iterdir() if path.is_dir() or path.match("test_*.py")}
        tests -= {path for path in tests if path.is_dir() and not list(path.glob("test_*.py"))}
        order = sorted(
            tests,
            key=lambda path: (path.stem.removeprefix("test_") not in names, path.is_dir(), path),
        )
        return [path.relative_to(ROOT) for path in order]

    def _cosmic_ray(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "cosmic_ray.cli", *arguments]
        subprocess.run(command, cwd=self.folder, check=True)


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
            yield _start(node.decorator_list[0]), (node.end_lineno or 0, node.end_col_offset or 0)


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
    total = caught = 0
    for workplace in workplaces:
        with sqlite3.connect(workplace.session) as session:
            results = session.execute(RESULTS).fetchall()
        survivors = [diff for outcome, diff in results if outcome == "SURVIVED"]
        for diff in survivors:
            print(diff, end="\n\n")
        total += len(results)
        caught += len(results) - len(survivors)
        print(f"{workplace.module}: {len(results) - len(survivors)} of {len(results)} caught\n")
    print(f"{caught} of {total} caught: {100 * caught / max(total, 1):.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="import name, such as bt_width")
    parser.add_argument("--exclude", nargs="*", default=[], help="files to leave alone")
    parser.add_argument("--host-only", action="store_true", help="leave kernels alone")
    parser.add_argument("--sample", type=int, help="so many changes only, chosen by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="files at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds of one test run")
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
    workplaces[0].require_passing_tests()
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(Workplace.run, workplaces))
    report(workplaces)


if __name__ == "__main__":
    main()
