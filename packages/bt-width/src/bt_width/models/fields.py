"""The keys of a config: asked for by name, refused by name; it knows no models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from ..errors import InvalidSpecError, UnknownModelError, shown

MAX_SIZE = 2**40
"""The largest size that a config may name; what is larger is a slip."""

MAX_LAYERS = 10_000
"""The most layers; each is an object here."""


class Fields:
    """The keys of one JSON object; a null one counts as missing."""

    def __init__(self, raw: Mapping[str, object], path: str = "") -> None:
        """Keep the object, and the keys that lead to it."""
        self._raw = raw
        self._path = path

    @classmethod
    def of(cls, raw: object, path: str = "") -> Self:
        """Return the keys of ``raw``.

        Raises:
            InvalidSpecError: It is not a mapping.
        """
        if not isinstance(raw, Mapping):
            what = f"{path} of the config" if path else "a config"
            raise InvalidSpecError(f"{what} must be a JSON object, not {shown(raw)}", key=path)
        return cls(raw, f"{path}." if path else "")

    def with_defaults(self, defaults: Mapping[str, object]) -> Fields:
        """Return the keys with those of ``defaults`` in place of missing ones."""
        given = {name: value for name, value in self._raw.items() if value is not None}
        return Fields({**defaults, **given}, self._path)

    def has(self, *names: str) -> bool:
        """Return whether one of the keys is there."""
        return any(self._raw.get(name) is not None for name in names)

    def raw(self, name: str) -> object:
        """Return a value as it stands, None where it is missing."""
        return self._raw.get(name)

    def inside(self, name: str) -> Fields:
        """Return the keys of an object under a key; none where it is missing."""
        value = self._raw.get(name)
        return Fields.of({} if value is None else value, self._path + name)

    def count(self, *names: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        """Return the whole number under the first of the keys that is there.

        Raises:
            UnknownModelError: None of them is.
            InvalidSpecError: It is not a whole number, or out of range.
        """
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if type(value) is not int or not minimum <= value <= maximum:
                raise self.refuse(name, f"a whole number in {minimum}..{maximum}")
            return value
        raise self.lacking(*names)

    def count_or(self, default: int, *names: str, minimum: int = 1) -> int:
        """Return as ``count``, or ``default`` where none of the keys is there."""
        return self.count(*names, minimum=minimum) if self.has(*names) else default

    def flag(self, name: str, default: bool) -> bool:
        """Return a key that is true or false."""
        value = self._raw.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def text(self, *names: str) -> str | None:
        """Return the text under the first of the keys that is there, or None."""
        for name in names:
            value = self._raw.get(name)
            if value is None:
                continue
            if type(value) is not str:
                raise self.refuse(name, "text")
            return value
        return None

    def per_layer(self, name: str, *lengths: int, known: Mapping[object, str]) -> list[str] | None:
        """Return what a list or a text of one entry per layer names, or None where it is missing.

        Args:
            name: The key.
            lengths: The numbers of layers that it may have; any where none is given.
            known: What each entry that is understood stands for.
        """
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, bytes) or len(value) > MAX_LAYERS:
            raise self.refuse(name, f"a list of at most {MAX_LAYERS} layers")
        if lengths and len(value) not in lengths:
            wanted = " or ".join(str(length) for length in lengths)
            raise InvalidSpecError(
                f"{self._path}{name} lists {len(value)} layers, and the model has {wanted}",
                key=self._path + name,
                num_listed=len(value),
                num_layers=lengths[0],
            )
        kinds = []
        for entry in value:
            if not isinstance(entry, str | int) or entry not in known:
                raise UnknownModelError(
                    f"{self._path}{name} has a layer {shown(entry)}, whose cache is not known; "
                    f"known are {', '.join(map(str, known))}",
                    key=self._path + name,
                    entry=entry,
                )
            kinds.append(known[entry])
        return kinds

    def indices(self, name: str, num_layers: int, *, first: int = 0) -> set[int]:
        """Return the layers that a list of numbers names, counted from 0; none where missing."""
        value = self._raw.get(name)
        if value is None:
            return set()
        if not isinstance(value, list | tuple) or len(value) > num_layers:
            raise self.refuse(name, f"a list of at most {num_layers} layers")
        for entry in value:
            if type(entry) is not int or not first <= entry < first + num_layers:
                raise self.refuse(name, f"layers in {first}..{first + num_layers - 1}")
        return {entry - first for entry in value}

    def refuse(self, name: str, wanted: str) -> InvalidSpecError:
        """Return the error of a key that is not what it must be."""
        value = self._raw.get(name)
        return InvalidSpecError(
            f"{self._path}{name} must be {wanted}, not {shown(value)}",
            key=self._path + name,
            value=value,
        )

    def lacking(self, *names: str) -> UnknownModelError:
        """Return the error of keys of which one is needed."""
        wanted = " or ".join(self._path + name for name in names)
        return UnknownModelError(
            f"the config lacks {wanted}, without which its cache is not known", key=wanted
        )
