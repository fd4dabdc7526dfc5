"""Cache groups of a model: the layers that share a table, with their specs and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from ..specs import AttentionSpec, CacheSpec, MambaSpec, UniformSpec
from .caches import (
    IndexCache,
    KeyValueCache,
    LatentCache,
    Layer,
    LayerCache,
    StateCache,
)
from .formats import state_bytes, token_bytes

MemberName: TypeAlias = Literal["mla", "indexer", "attention", "window", "mamba"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """What the layers of a group keep under one name, on one tensor-parallel rank.

    Attributes:
        name: What it is.
        num_layers: Layers that keep it.
        token_bytes: Bytes of a token, of all its layers.
        recurrent_bytes: Bytes of a recurrent state, of all its layers.
        conv_bytes: Bytes of a state's convolution inputs, of all its layers.
    """

    name: MemberName
    num_layers: int
    token_bytes: int = 0
    recurrent_bytes: int = 0
    conv_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, of all its layers."""
        return self.recurrent_bytes + self.conv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGroup:
    """A cache group of a model: layers that share one table.

    Attributes:
        name: What the group is called.
        spec: What it is planned from.
        members: What its layers keep.
        cache_dtype: The dtype of keys, values and latents; None where none is kept.
        layer_bytes: For each layer of the model, the bytes of a block on one rank;
            pipeline stages are cut from it.
        draft_bytes: Bytes of a block in all draft layers.
    """

    name: str
    spec: CacheSpec
    members: tuple[GroupMember, ...]
    cache_dtype: str | None
    layer_bytes: tuple[int, ...] = field(repr=False)
    draft_bytes: int

    @property
    def num_layers(self) -> int:
        """Layers of the group: those of its first member, which others are a part of."""
        return self.members[0].num_layers

    @property
    def token_bytes(self) -> int:
        """Bytes of a token, of all layers."""
        return sum(member.token_bytes for member in self.members)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, of all layers."""
        return sum(member.state_bytes for member in self.members)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, of all layers."""
        return sum(self.layer_bytes) + self.draft_bytes

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer expands the group's table."""
        return any(member.name == "indexer" for member in self.members)


class KeptCache(NamedTuple):
    """One cache of one layer.

    Attributes:
        layer: The layer's place in the model.
        cache: What it keeps, on one rank.
    """

    layer: int
    cache: LayerCache


class ModelCut(NamedTuple):
    """A model's caches on one rank, and the groups that they are cut into.

    Attributes:
        layers: The model's layers, drafts included.
        num_drafts: How many of them, from the end, are draft layers.
        kept: All caches of one rank.
        block_size: Tokens of a block.
        dtype: The dtype of keys, values and latents, where it is known.
    """

    layers: tuple[Layer, ...]
    num_drafts: int
    kept: list[KeptCache]
    block_size: int
    dtype: str | None

    def windows(self) -> list[int]:
        """Return the windows that occur, from the shortest."""
        return sorted(
            {
                cache.window
                for _, cache in self.kept
                if isinstance(cache, KeyValueCache) and cache.window is not None
            }
        )

    def latents(self) -> ModelGroup | None:
        """Return the group of latents and index keys."""
        members = [
            self._tokens("mla", self._of(lambda cache: isinstance(cache, LatentCache))),
            self._tokens("indexer", self._of(lambda cache: isinstance(cache, IndexCache))),
        ]
        found = [member for member in members if member.num_layers]
        if not found:
            return None
        layer = AttentionSpec(block_size=self.block_size)
        spec: CacheSpec = layer
        if len(found) > 1:
            spec = UniformSpec(members=[(member.name, layer) for member in found])
        kept = self._of(lambda cache: isinstance(cache, LatentCache | IndexCache))
        return self._group("mla", spec, found, self._token_blocks(kept))

    def attention(self, name: str, spec: CacheSpec, window: int | None) -> ModelGroup | None:
        """Return the group of the attention layers with this window."""
        kept = self._of(lambda cache: isinstance(cache, KeyValueCache) and cache.window == window)
        if not kept:
            return None
        member = self._tokens("attention" if window is None else "window", kept)
        return self._group(name, spec, [member], self._token_blocks(kept))

    def states(
        self, spec: MambaSpec, state_dtype: str, conv_dtype: str | None
    ) -> ModelGroup | None:
        """Return the group of recurrent layers."""
        recurrent = conv = count = 0
        blocks = [0] * len(self.layers)
        for place, cache in self.kept:
            if isinstance(cache, StateCache):
                numbers = state_bytes(cache, state_dtype=state_dtype, conv_dtype=conv_dtype)
                recurrent, conv, count = recurrent + numbers[0], conv + numbers[1], count + 1
                blocks[place] += sum(numbers)
        if not count:
            return None
        member = GroupMember(
            name="mamba", num_layers=count, recurrent_bytes=recurrent, conv_bytes=conv
        )
        return self._group("mamba", spec, [member], blocks)

    def _of(self, is_wanted: Callable[[LayerCache], bool]) -> list[KeptCache]:
        return [kept for kept in self.kept if is_wanted(kept.cache)]

    def _tokens(self, name: MemberName, kept: list[KeptCache]) -> GroupMember:
        return GroupMember(
            name=name,
            num_layers=len(kept),
            token_bytes=sum(token_bytes(cache, self.dtype) for _, cache in kept),
        )

    def _token_blocks(self, kept: Iterable[KeptCache]) -> list[int]:
        blocks = [0] * len(self.layers)
        for place, cache in kept:
            blocks[place] += token_bytes(cache, self.dtype) * self.block_size
        return blocks

    def _group(
        self, name: str, spec: CacheSpec, members: list[GroupMember], blocks: list[int]
    ) -> ModelGroup:
        own = len(self.layers) - self.num_drafts
        return ModelGroup(
            name=name,
            spec=spec,
            members=tuple(members),
            cache_dtype=self.dtype,
            layer_bytes=tuple(blocks[:own]),
            draft_bytes=sum(blocks[own:]),
        )
