"""A builder's class with other options; it knows none of them."""

from __future__ import annotations

from typing import TypeVar, cast

from bt_width import InvalidSpecError

Builder = TypeVar("Builder")


def with_options(builder_class: type[Builder], options: object, kind: type) -> type[Builder]:
    """Return a subclass of ``builder_class`` that differs in its ``options`` alone.

    Raises:
        InvalidSpecError: They are no ``kind``.
    """
    if not isinstance(options, kind):
        raise InvalidSpecError(f"options must be {kind.__name__}, not {options!r}", value=options)
    facts = {"options": options, "__module__": builder_class.__module__}
    return cast(type[Builder], type(builder_class.__name__, (builder_class,), facts))
