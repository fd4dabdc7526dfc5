"""The ``--group`` option: ``KIND:BLOCK_SIZE[:...]`` read into a spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import BlockTableError, InvalidSpecError, shown
from ..specs import AttentionSpec, CacheSpec, MambaSpec, RingSpec, SlidingWindowSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOption:
    """A group as the user wrote it.

    Attributes:
        text: The option's value.
        spec: What it means.
        kernel_block_size: Tokens of a kernel block, or None for the block itself.
    """

    text: str
    spec: CacheSpec
    kernel_block_size: int | None


_SYNTAX = {
    "attention": "attention:BLOCK_SIZE[:kernel=N][:align=N|none][:states=N][:replicated]",
    "window": "window:BLOCK_SIZE:WINDOW[:kernel=N][:align=N|none]",
    "mamba": "mamba:BLOCK_SIZE[:none|align][:SPECULATIVE_BLOCKS]",
    "ring": "ring:BLOCK_SIZE",
}


def parse_group(text: str) -> GroupOption:
    """Read one ``--group`` value.

    Raises:
        InvalidSpecError: It names no kind, or a field is unknown, missing or out of range.
    """
    kind, *fields = text.split(":")
    if kind not in _SYNTAX:
        raise InvalidSpecError(f"group {shown(text)}: the kind must be one of {', '.join(_SYNTAX)}")
    try:
        return _read_group(text, kind, fields)
    except (BlockTableError, LookupError, ValueError) as error:
        detail = f": {error}" if isinstance(error, BlockTableError) else ""
        raise InvalidSpecError(
            f"group {shown(text)} does not read as {_SYNTAX[kind]}{detail}", group=text
        ) from error


def _read_group(text: str, kind: str, fields: list[str]) -> GroupOption:
    plain = [field for field in fields if "=" not in field]
    named = dict(field.split("=", 1) for field in fields if "=" in field)
    if len(plain) + len(named) != len(fields):
        raise InvalidSpecError("a field is given twice")
    kernel_block_size: int | None = None
    options: dict[str, Any] = {"block_size": int(plain.pop(0))}
    if kind in ("attention", "window"):
        kernel_block_size = int(named.pop("kernel")) if "kernel" in named else None
        if "align" in named:
            align = named.pop("align")
            options["token_alignment"] = None if align == "none" else int(align)
    spec: CacheSpec
    match kind:
        case "attention":
            if "states" in named:
                options["tokens_per_state"] = int(named.pop("states"))
            if "replicated" in plain:
                plain.remove("replicated")
                options["sharded"] = False
            spec = AttentionSpec(**options)
        case "window":
            spec = SlidingWindowSpec(window=int(plain.pop(0)), **options)
        case "mamba":
            if plain and not plain[0].isdecimal():
                options["mode"] = plain.pop(0)
            if plain:
                options["num_speculative_blocks"] = int(plain.pop(0))
            spec = MambaSpec(**options)
        case _:
            spec = RingSpec(**options)
    if plain or named:
        raise InvalidSpecError(f"unknown fields {plain + sorted(named)}")
    return GroupOption(text=text, spec=spec, kernel_block_size=kernel_block_size)
