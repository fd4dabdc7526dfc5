"""What a cache group is: one frozen dataclass per kind; they know nothing of limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, TypeGuard, final

from ._checks import require_instance, require_int
from .errors import InvalidSpecError, shown

MambaMode: TypeAlias = Literal["none", "align"]


def _require_alignment(token_alignment: int | None) -> None:
    if token_alignment is not None:
        require_int("token_alignment", token_alignment, minimum=1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Full attention, MLA or a DSA indexer: every token of a request keeps its place.

    Attributes:
        block_size: Tokens of a block.
        sharded: Whether context parallelism spreads the tokens over its ranks;
            False where every rank keeps them all.
        tokens_per_state: Tokens that share one stored state (compressed caches).
        token_alignment: Tokens that a row spans a multiple of, or None. 128 is vLLM's, for kernels
            such as FlashInfer's MLA that read pages of 128 tokens together.
    """

    block_size: int
    sharded: bool = True
    tokens_per_state: int = 1
    token_alignment: int | None = 128

    def __post_init__(self) -> None:
        """Check each field alone; ``BlockTableLayout.plan`` checks them together."""
        require_int("block_size", self.block_size, minimum=1)
        require_instance("sharded", self.sharded, bool, wanted="a bool")
        require_int("tokens_per_state", self.tokens_per_state, minimum=1)
        _require_alignment(self.token_alignment)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec:
    """Attention over the last tokens only; blocks behind the window are given back.

    Replicated under context parallelism.

    Attributes:
        block_size: Tokens of a block.
        window: Tokens that a query sees, itself included.
        extra_retained_tokens: Tokens kept behind the window, for drafters that look back.
        token_alignment: Tokens that a row spans a multiple of, or None. 128 is vLLM's, for kernels
            such as FlashInfer's MLA that read pages of 128 tokens together.
    """

    block_size: int
    window: int
    extra_retained_tokens: int = 0
    token_alignment: int | None = 128

    def __post_init__(self) -> None:
        """Check each field alone."""
        require_int("block_size", self.block_size, minimum=1)
        require_int("window", self.window, minimum=1)
        require_int("extra_retained_tokens", self.extra_retained_tokens, minimum=0)
        _require_alignment(self.token_alignment)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec:
    """Recurrent state: a block holds a state, not tokens; replicated, never split.

    Attributes:
        block_size: Tokens between two kept states (mode "align").
        mode: "none" keeps one state a request, "align" one every ``block_size`` tokens.
        num_speculative_blocks: Further states, for draft tokens that may be rejected.
    """

    block_size: int
    mode: MambaMode = "none"
    num_speculative_blocks: int = 0

    def __post_init__(self) -> None:
        """Check each field alone."""
        require_int("block_size", self.block_size, minimum=1)
        if not isinstance(self.mode, str) or self.mode not in ("none", "align"):
            raise InvalidSpecError(
                f'mode must be "none" or "align", not {shown(self.mode)}', mode=self.mode
            )
        require_int("num_speculative_blocks", self.num_speculative_blocks, minimum=0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RingSpec:
    """One block a request, written round and round; replicated, never split.

    Attributes:
        block_size: Tokens of the ring.
    """

    block_size: int

    def __post_init__(self) -> None:
        """Check the field."""
        require_int("block_size", self.block_size, minimum=1)


LayerSpec: TypeAlias = AttentionSpec | SlidingWindowSpec | MambaSpec | RingSpec
"""The kinds of cache group; the union is closed."""

_LAYER_KINDS = (AttentionSpec, SlidingWindowSpec, MambaSpec, RingSpec)


def _is_layer(spec: object) -> TypeGuard[LayerSpec]:
    # not isinstance: a kind derived from another would count as that other
    return type(spec) in _LAYER_KINDS


@final
@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class UniformSpec:
    """Layers that share one table: of one kind, and equal but for ``tokens_per_state``.

    Attributes:
        members: The layers' specs by name, as pairs sorted by name.
    """

    members: tuple[tuple[str, LayerSpec], ...]

    def __init__(self, *, members: Mapping[str, LayerSpec] | Iterable[tuple[str, LayerSpec]]):
        """Sort ``members`` by name and refuse those that cannot share a table."""
        pairs = _as_pairs(members)
        _require_one_plan(pairs)
        object.__setattr__(self, "members", pairs)


CacheSpec: TypeAlias = LayerSpec | UniformSpec
"""What a cache group's layout is planned from."""


def _as_pairs(
    members: Mapping[str, LayerSpec] | Iterable[tuple[str, LayerSpec]],
) -> tuple[tuple[str, LayerSpec], ...]:
    try:
        listed = list(members.items() if isinstance(members, Mapping) else members)
        pairs = tuple(sorted(dict(listed).items()))
    except (TypeError, ValueError):
        raise InvalidSpecError(
            f"members must map names to specs, not {shown(members)}", members=members
        ) from None
    if not pairs:
        raise InvalidSpecError("a UniformSpec needs at least one member", members=())
    if len(pairs) != len(listed):
        names = [name for name, _ in listed]
        raise InvalidSpecError(f"a member's name occurs twice in {shown(names)}", members=names)
    for name, member in pairs:
        require_instance("a member's name", name, str, wanted="a str")
        if not _is_layer(member):
            raise InvalidSpecError(
                f"member {shown(name)} must be a spec of one layer, not {shown(member)}; "
                "a UniformSpec does not nest",
                member=name,
                value=member,
            )
    return pairs


def _require_one_plan(pairs: tuple[tuple[str, LayerSpec], ...]) -> None:
    first_name, first = pairs[0]
    for name, member in pairs[1:]:
        if type(member) is not type(first):
            _refuse_members(first_name, name, "kind", type(first).__name__, type(member).__name__)
        for field in fields(first):
            ours, theirs = getattr(first, field.name), getattr(member, field.name)
            if field.name != "tokens_per_state" and ours != theirs:
                _refuse_members(first_name, name, field.name, ours, theirs)


def _refuse_members(first: str, second: str, field: str, ours: object, theirs: object) -> None:
    raise InvalidSpecError(
        f"members {shown(first)} and {shown(second)} cannot share a table: "
        f"{field} is {shown(ours)} in one and {shown(theirs)} in the other; "
        "give them groups of their own",
        members=(first, second),
        field=field,
        values=(ours, theirs),
    )


def layers_of(spec: CacheSpec) -> tuple[LayerSpec, ...]:
    """Return the specs of a group's layers; the first one speaks for what they share."""
    if type(spec) is UniformSpec:
        return tuple(member for _, member in spec.members)
    if _is_layer(spec):
        return (spec,)
    raise InvalidSpecError(
        f"spec must be a cache spec, not {shown(spec)} ({type(spec).__name__})", value=spec
    )
