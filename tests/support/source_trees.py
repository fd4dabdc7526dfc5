"""Reads source as syntax trees, for what must not stand in it. It imports none of it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("bt_width", "bt_tables", "bt_builders", "bt_runner")  # from the ground up
CLAMPS = {"min", "max"}
DIVISIONS = {"divmod", "cdiv", "ceil", "ceil_div", "ceildiv", "div_ceil", "floordiv"}


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: Its dotted name, the package's own for an ``__init__``.
        path: Where it stands.
        tree: Its syntax.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def package(self) -> str:
        """The import name of the distribution that it belongs to."""
        return self.name.partition(".")[0]


def source_folder(package: str) -> Path:
    """The folder that has to be on the path for a package to be imported."""
    return ROOT / "packages" / package.replace("_", "-") / "src"


def modules(package: str) -> list[Module]:
    """Every source file of a package."""
    folder = source_folder(package)
    return [read_module(path, folder) for path in sorted((folder / package).rglob("*.py"))]


def read_module(path: Path, folder: Path) -> Module:
    """One source file under a folder of the import path."""
    parts = path.relative_to(folder).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Module(name, path, ast.parse(path.read_text(encoding="utf-8"), str(path)))


def imports(module: Module, *, at_import_time: bool = False) -> Iterator[str]:
    """Dotted names that a module imports; ``from a import b`` gives ``a.b``.

    Args:
        module: The source file.
        at_import_time: Leave out what waits inside a function or for a type checker.
    """
    for node in _walk(module.tree, at_import_time):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _walk(node: ast.AST, at_import_time: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_import_time and isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            continue
        if at_import_time and isinstance(child, ast.If) and _is_for_a_type_checker(child.test):
            continue
        yield child
        yield from _walk(child, at_import_time)


def _is_for_a_type_checker(test: ast.expr) -> bool:
    return name_of(test) == "TYPE_CHECKING"


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = module.path.name == "__init__.py"
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def name_of(node: ast.expr) -> str:
    """The last name of a name or an attribute; empty for anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def made_widths(tree: ast.AST) -> list[int]:
    """Lines that make a ``BlockTableWidth``, by a call or by a cast."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (
            name_of(node.func) == "BlockTableWidth"
            or (name_of(node.func) == "cast" and "BlockTableWidth" in ast.dump(node.args[0]))
        )
    ]


def length_arithmetic(tree: ast.AST) -> list[int]:
    """Lines that calculate with ``max_model_len``, under its own name or one given to it.

    A clamp (``min``, ``max``) and a comparison hand no length on, and are no calculation.
    """
    lengths = {"max_model_len"} | {
        name_of(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and name_of(node.value) == "max_model_len"
        for target in node.targets
    }
    return sorted(
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.expr | ast.stmt)
            and any(_holds_a_length(operand, lengths) for operand in _operands(node))
        }
    )


def split_arithmetic(tree: ast.AST) -> list[int]:
    """Lines that calculate with ``shards`` or ``interleave``, whatever they belong to."""
    names = {"shards", "interleave"}
    return sorted(
        {
            operand.lineno
            for node in ast.walk(tree)
            for operand in _operands(node)
            if name_of(operand).lower() in names
        }
    )


def _operands(node: ast.AST) -> list[ast.expr]:
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.UnaryOp(operand=operand):
            return [] if isinstance(node.op, ast.Not) else [operand]
        case ast.AugAssign(target=target, value=value):
            return [target, value]
        case ast.Call(func=func, args=args) if name_of(func) in DIVISIONS:
            return args
        case _:
            return []


def _holds_a_length(node: ast.AST, lengths: set[str]) -> bool:
    if isinstance(node, ast.Compare) or (
        isinstance(node, ast.Call) and name_of(node.func) in CLAMPS
    ):
        return False
    if isinstance(node, ast.expr) and name_of(node) in lengths:
        return True
    return any(_holds_a_length(child, lengths) for child in ast.iter_child_nodes(node))
