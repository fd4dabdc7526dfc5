"""The dataclasses of a package, found by importing all of it."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass
from types import ModuleType


def value_classes(package: ModuleType) -> list[type]:
    """Every dataclass that a module of ``package`` defines."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module(module.name) for module in found]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == module.__name__
    ]
