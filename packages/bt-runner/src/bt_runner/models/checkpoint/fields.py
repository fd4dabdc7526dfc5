"""The fields of a ``config.json``: asked for by name, refused by name; it knows no models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bt_runner.errors import BadInputError
from bt_runner.files import read_file
from bt_width.errors import InvalidSpecError, shown
from bt_width.plan.config_file import parse_config

MAX_CONFIG_BYTES = 2**24
"""The largest configuration that is read; published ones have some kilobytes."""

Value = TypeVar("Value", bool, int, float, str)


class Fields:
    """The fields of one JSON object; whatever is not as asked for is a ``BadInputError``."""

    def __init__(self, raw: Mapping[str, object], source: str) -> None:
        """Keep the object, and what to call it in errors."""
        self._raw = raw
        self._source = source

    @classmethod
    def read(cls, path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> Fields:
        """Return the fields of a file of at most ``max_bytes``."""
        data = read_file(path, max_bytes=max_bytes)
        try:
            return cls(parse_config(data, str(path)), str(path))
        except InvalidSpecError as error:
            raise BadInputError(str(error), **error.details) from error

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
        if kind is float and type(value) is int:
            value = _as_float(value)
        is_number = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(value, kind) or (kind is int and type(value) is bool) or not is_number:
            wanted = f"a finite {kind.__name__}" if kind is float else kind.__name__
            raise BadInputError(
                f"{self._source}: {name} must be {wanted}, and is {shown(self._raw.get(name))}",
                source=self._source,
                field=name,
                value=value,
            )
        return value

    def count(self, name: str, default: int | None = None, *, maximum: int = 2**31 - 1) -> int:
        """Return a field that is a whole number from 1 to ``maximum``."""
        value = self.get(name, int, default)
        if not 1 <= value <= maximum:
            limit = "at least 1" if value < 1 else f"at most {maximum:,}"
            raise BadInputError(
                f"{self._source}: {name} must be {limit}, and is {shown(value)}",
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
        found: Sequence[object] = value if isinstance(value, list | str) else ()
        strange = [index for index, entry in enumerate(found) if entry not in known]
        if strange or len(found) != num_layers:
            told = f"is {shown(value)}"
            if isinstance(value, list):
                told = f"lists {len(value)}"
            if strange:
                told = f"has {shown(found[strange[0]])} for layer {strange[0]}"
            raise BadInputError(
                f"{self._source}: {name} must have {' or '.join(known)} for each of "
                f"{num_layers} layers, and {told}",
                source=self._source,
                field=name,
                num_layers=num_layers,
            )
        return tuple(map(str, found))

    def __contains__(self, name: str) -> bool:
        """Say whether there is a field of that name, null or not."""
        return name in self._raw

    def raw(self, name: str) -> object:
        """Return a field as it stands, None where it is missing."""
        return self._raw.get(name)

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a field that asks for what is not built here; a missing one asks for nothing."""
        value = self._raw.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(shown, allowed)) or "nothing"
            raise BadInputError(
                f"{self._source}: {name} is {shown(value)}, and only {wanted} is built here",
                source=self._source,
                field=name,
                value=value,
            )


def _as_float(value: int) -> float:
    """Return the nearest float; infinity where none is near."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
