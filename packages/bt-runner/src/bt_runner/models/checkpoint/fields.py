"""The fields of a ``config.json``: asked for by name, refused by name; it knows no models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from bt_runner.errors import BadInputError

Value = TypeVar("Value", bool, int, float, str)


class Fields:
    """The fields of one JSON object; whatever is not as asked for is a ``BadInputError``."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        """Keep the object, and what to call it in errors."""
        self._raw = raw
        self._source = source

    @classmethod
    def read(cls, path: Path) -> Fields:
        """Return the fields of a file."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInputError(f"cannot read {path}: {error.strerror}", path=str(path)) from error
        except ValueError as error:
            raise BadInputError(f"{path} is not JSON: {error}", path=str(path)) from error
        return cls.of(raw, str(path))

    @classmethod
    def of(cls, raw: object, source: str) -> Fields:
        """Return the fields of a parsed object."""
        if not isinstance(raw, dict):
            raise BadInputError(f"{source} is not a JSON object", source=source)
        return cls(raw, source)

    def get(self, name: str, kind: type[Value], default: Value | None = None) -> Value:
        """Return a field; a missing or null one is its default, or refused where there is none."""
        value = self._raw.get(name)
        if value is None:
            value = default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BadInputError(
                f"{self._source}: {name} must be {kind.__name__}, and is {value!r}",
                source=self._source,
                field=name,
                value=value,
            )
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """Return a field that is a whole number of at least one."""
        value = self.get(name, int, default)
        if value < 1:
            raise BadInputError(
                f"{self._source}: {name} must be at least 1, and is {value}",
                source=self._source,
                field=name,
                value=value,
            )
        return value

    def per_layer(
        self, name: str, num_layers: int, known: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        """Return a field that has one of ``known`` for each layer, or None where it is missing."""
        value = self._raw.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list | str)
            or len(value) != num_layers
            or not all(entry in known for entry in value)
        ):
            raise BadInputError(
                f"{self._source}: {name} must have {' or '.join(known)} for each of "
                f"{num_layers} layers, and is {value!r}",
                source=self._source,
                field=name,
                num_layers=num_layers,
            )
        return tuple(value)

    def raw(self, name: str) -> object:
        """Return a field as it stands, None where it is missing."""
        return self._raw.get(name)

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a field that asks for what is not built here; a missing one asks for nothing."""
        value = self._raw.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(repr(one) for one in allowed) or "nothing"
            raise BadInputError(
                f"{self._source}: {name} is {value!r}, and only {wanted} is built here",
                source=self._source,
                field=name,
                value=value,
            )
