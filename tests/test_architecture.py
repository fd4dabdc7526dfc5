"""The architecture as it is drawn: what may import what, what an import does, what may count."""

import ast
import json
import os
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypedDict

import pytest
from tests.support.source_trees import (
    PACKAGES,
    ROOT,
    Module,
    imports,
    length_arithmetic,
    made_widths,
    modules,
    read_module,
    source_folder,
    split_arithmetic,
)

PROBE = """
import json, os, sys
sys.path[:0] = json.loads(sys.argv[2])
environment, loaded = dict(os.environ), set(sys.modules)
# all that the package offers, loaded by their first use or not
__import__(sys.argv[1], fromlist=["*"])
torch = sys.modules.get("torch")
print(json.dumps({
    "modules": sorted(set(sys.modules) - loaded),
    "environment": {
        name: os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name)
    },
    "cuda": bool(torch and torch.cuda.is_initialized()),
}))
"""


class Effects(TypedDict):
    """What an import did to a fresh process."""

    modules: list[str]
    environment: dict[str, str | None]
    cuda: bool


def effects_of_import(name: str, *folders: Path, flags: tuple[str, ...] = ()) -> Effects:
    """Import a module in a fresh interpreter that has the folders on its path."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "COV"))}
    done = subprocess.run(
        [sys.executable, *flags, "-c", PROBE, name, json.dumps([str(f) for f in folders])],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    effects: Effects = json.loads(done.stdout.splitlines()[-1])
    return effects


def foreign_modules(effects: Effects, own: str) -> set[str]:
    """Top-level modules that neither Python nor the package itself brought."""
    loaded = {name.partition(".")[0] for name in effects["modules"]}
    return {name for name in loaded - {own} if name not in sys.stdlib_module_names}


def is_upward(module: Module, name: str) -> bool:
    """Whether an imported name stands above the module's own package."""
    package = name.partition(".")[0]
    return package in PACKAGES and PACKAGES.index(package) > PACKAGES.index(module.package)


def circle(found: list[Module]) -> list[str]:
    """Modules that import each other in a circle while they are imported; empty if none do."""
    names = {module.name for module in found}
    graph = {
        module.name: {_imported(name, names) for name in imports(module, at_import_time=True)}
        - {"", module.name}
        for module in found
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _imported(name: str, names: set[str]) -> str:
    """The module that a dotted name is, or is found in; empty if it is none of these."""
    while name not in names and name:
        name = name.rpartition(".")[0]
    return name


# bt-width stands on Python alone.


def test_bt_width_loads_the_standard_library_only() -> None:
    """Without any site-packages: ``-S`` shows no other package, ``-I`` no other setting."""
    effects = effects_of_import("bt_width", source_folder("bt_width"), flags=("-I", "-S"))

    assert "bt_width" in effects["modules"]
    assert foreign_modules(effects, "bt_width") == set()


def test_the_command_of_bt_width_loads_the_standard_library_only() -> None:
    effects = effects_of_import("bt_width.__main__", source_folder("bt_width"), flags=("-I", "-S"))

    assert foreign_modules(effects, "bt_width") == set()


def test_the_command_is_loaded_by_those_who_run_it() -> None:
    effects = effects_of_import("bt_width", source_folder("bt_width"), flags=("-I", "-S"))

    assert "argparse" not in effects["modules"]


def test_no_line_of_bt_width_imports_anything_else() -> None:
    """Not even one that waits inside a function."""
    for module in modules("bt_width"):
        roots = {name.partition(".")[0] for name in imports(module)}

        assert roots <= sys.stdlib_module_names | {"bt_width"}, module.path


def test_the_probe_sees_a_foreign_module(tmp_path: Path) -> None:
    """The tests above can fail."""
    (tmp_path / "stranger.py").touch()
    (tmp_path / "guest.py").write_text("import json, stranger\n")

    effects = effects_of_import("guest", tmp_path, flags=("-I", "-S"))

    assert foreign_modules(effects, "guest") == {"stranger"}


# An import changes nothing in the process.


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_an_import_leaves_the_process_as_it_was(package: str) -> None:
    """No Triton, no environment variable, no CUDA."""
    pytest.importorskip("torch")

    effects = effects_of_import(package, *map(source_folder, PACKAGES))

    assert package in effects["modules"]
    assert [name for name in effects["modules"] if name.partition(".")[0] == "triton"] == []
    assert effects["environment"] == {}
    assert not effects["cuda"]


def test_the_probe_sees_triton_a_variable_and_cuda(tmp_path: Path) -> None:
    """The test above can fail."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").touch()
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    is_initialized = staticmethod(lambda: True)\n"
    )
    (tmp_path / "guest.py").write_text(
        "import os, torch, triton\nos.environ['TRITON_INTERPRET'] = '1'\n"
    )

    effects = effects_of_import("guest", tmp_path)

    assert "triton" in effects["modules"]
    assert effects["environment"]["TRITON_INTERPRET"] == "1"
    assert effects["cuda"]


def test_triton_has_one_door() -> None:
    """One module imports it; kernels get it from there."""
    doors = [
        module.name
        for package in PACKAGES
        for module in modules(package)
        if any(name.partition(".")[0] == "triton" for name in imports(module))
    ]

    assert doors == ["bt_tables.triton_support"]


# Imports point down.


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_upward(package: str) -> None:
    upward = [
        (module.name, name)
        for module in modules(package)
        for name in imports(module)
        if is_upward(module, name)
    ]

    assert upward == []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_go_in_no_circle(package: str) -> None:
    assert circle(modules(package)) == []


def test_an_upward_import_is_seen(tmp_path: Path) -> None:
    """Relative, or inside a function."""
    path = tmp_path / "bt_tables" / "rows.py"
    path.parent.mkdir()
    path.write_text("from . import edits\nimport bt_width\ndef f():\n    import bt_runner.loop\n")
    module = read_module(path, tmp_path)

    assert [name for name in imports(module) if is_upward(module, name)] == ["bt_runner.loop"]


@pytest.mark.parametrize(
    ("edits", "closed"),
    [
        pytest.param("from bt_tables.rows import Row", True, id="another-module"),
        pytest.param("from bt_tables import Row", True, id="the-package-itself"),
        pytest.param("def f():\n    from bt_tables.rows import Row", False, id="not-at-import"),
        pytest.param("import bt_width", False, id="none"),
    ],
)
def test_a_circle_is_seen(tmp_path: Path, edits: str, closed: bool) -> None:
    package = tmp_path / "bt_tables"
    package.mkdir()
    (package / "__init__.py").write_text("from .rows import Row\n")
    (package / "rows.py").write_text("from . import edits\n")
    (package / "edits.py").write_text(edits)
    found = [read_module(path, tmp_path) for path in package.iterdir()]

    assert bool(circle(found)) is closed


# One place counts.


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_only_bt_width_makes_a_width(package: str) -> None:
    """Reported as https://github.com/vllm-project/vllm/pull/50302"""
    made = {module.name: made_widths(module.tree) for module in modules(package)}

    assert {name: lines for name, lines in made.items() if lines} == {}


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_only_bt_width_calculates_with_the_length_limit(package: str) -> None:
    """Five crash reports had one cause: a second formula beside the first.

    Reported as https://github.com/vllm-project/vllm/pull/50302
    """
    found = {module.name: length_arithmetic(module.tree) for module in modules(package)}

    assert {name: lines for name, lines in found.items() if lines} == {}


ADDRESSING = {"bt_tables.reference.addressing", "bt_tables.kernels.addressing"}
"""The one vectorised reference and the one device function of each address calculation."""


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_only_the_addressing_modules_calculate_with_the_split_over_ranks(package: str) -> None:
    """One pure function in bt-width, one reference and one device function stand for all."""
    found = {module.name: split_arithmetic(module.tree) for module in modules(package)}

    assert {name for name, lines in found.items() if lines} <= ADDRESSING


@pytest.mark.parametrize(
    "line",
    [
        "local = run // shards * interleave",
        "rank = position // addressing.interleave % addressing.shards",
        "turns = lens // (SHARDS * INTERLEAVE)",
        "x += layout.shards",
        "block, within = divmod(position, size * addressing.shards)",
        "n = divmod(position, addressing.interleave)",
    ],
)
def test_a_calculation_with_the_split_is_seen(line: str) -> None:
    """The test above can fail."""
    assert split_arithmetic(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line", ["if layout.shards > 1: pass", "f(shards=addressing.shards)", "n = ranks // 2"]
)
def test_the_split_handed_on_or_compared_is_no_calculation(line: str) -> None:
    assert split_arithmetic(ast.parse(line)) == []


@pytest.mark.parametrize(
    "line",
    [
        "width = BlockTableWidth(3)",
        "width = bt_width.BlockTableWidth(n)",
        "width = cast(BlockTableWidth, 3)",
        "width = typing.cast('BlockTableWidth', 3)",
        "f(BlockTableWidth(3))",
    ],
)
def test_a_made_width_is_seen(line: str) -> None:
    """The test above can fail."""
    assert made_widths(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line", ["def f(width: BlockTableWidth) -> None: ...", "width = layout.width", "cast(int, x)"]
)
def test_a_used_width_is_not_a_made_one(line: str) -> None:
    assert made_widths(ast.parse(line)) == []


@pytest.mark.parametrize(
    "line",
    [
        "n = max_model_len // 64",
        "n = -(-limits.max_model_len // block_size)",
        "n = (limits.max_model_len + lookahead) // 64",
        "n = cdiv(limits.max_model_len, 64)",
        "n = divmod(int(limits.max_model_len), 64)[0]",
        "n = math.ceil(self.limits.max_model_len)",
        "n = 1 + limits.max_model_len",
        "n *= limits.max_model_len",
        "longest = limits.max_model_len; n = longest // 64",
        "n = torch.zeros(4, limits.max_model_len // 64)",
        "self.length = limits.max_model_len; n = self.length * 2",
    ],
)
def test_a_calculation_with_the_length_limit_is_seen(line: str) -> None:
    """The test above can fail."""
    assert length_arithmetic(ast.parse(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "ok = seq_len <= limits.max_model_len",
        "n = min(seq_len, limits.max_model_len)",
        "n = min(seq_len, limits.max_model_len) + 1",
        "f(max_model_len=limits.max_model_len)",
        "f(limits.max_model_len)",
        "if not limits.max_model_len: pass",
        "text = f'{limits.max_model_len} tokens'",
        "n = 1 + (seq_len > limits.max_model_len)",
        "n = other_len // 64",
    ],
)
def test_a_clamp_and_a_comparison_are_no_calculation(line: str) -> None:
    assert length_arithmetic(ast.parse(line)) == []


# What no source file has.


@pytest.mark.parametrize("package", PACKAGES)
def test_no_source_asserts(package: str) -> None:
    """What a caller can cause raises, under ``python -O`` too."""
    asserts = [
        f"{module.path}:{node.lineno}"
        for module in modules(package)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assert)
    ]

    assert asserts == []


def test_every_ignored_type_error_has_its_reason() -> None:
    """``# type: ignore[code]  # why``"""
    bare = re.compile(r"# type: ignore(?!\[[a-z, -]+\]  # \w)")
    found = [
        f"{path}:{number}"
        for folder in ("packages", "benchmarks", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]

    assert found == []
