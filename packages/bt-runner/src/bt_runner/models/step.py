"""One step as the model's layers see it: tokens, positions, and each group's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from bt_builders import CommonAttentionMetadata, MambaMetadata
from bt_runner.errors import RunnerError
from bt_runner.models.cache.cache_groups import MAMBA
from bt_runner.models.layers.numerics import Rotation
from bt_runner.models.layers.rope import Rope
from bt_runner.models.layers.state_places import DecodePlaces, PrefillPlaces

M = TypeVar("M")
StatePlaces = tuple[DecodePlaces | None, PrefillPlaces | None]


@dataclass(frozen=True, slots=True)
class GroupStep:
    """A cache group's part of a step.

    Attributes:
        common: What its builders were given.
        built: What they built.
    """

    common: CommonAttentionMetadata
    built: Sequence[object]

    def of(self, kind: type[M]) -> M:
        """Return what the builder of that kind of metadata built.

        Raises:
            RunnerError: None of the group's builders builds it.
        """
        for metadata in self.built:
            if isinstance(metadata, kind):
                return metadata
        raise RunnerError(f"no builder of this group builds {kind.__name__}")


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step's tokens (T), and where their requests' state lies.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64.
        req_of_token: ``[T]`` int64, each token's row in the batch.
        groups: By name.
        dtype: Of the model.
        rotations: The rotations computed so far.
        places: Where the tokens of recurrent layers stand, by the inputs they look back on.
    """

    token_ids: Tensor
    positions: Tensor
    req_of_token: Tensor
    groups: Mapping[str, GroupStep]
    dtype: torch.dtype
    rotations: dict[Rope, Rotation] = field(default_factory=dict)
    places: dict[int, StatePlaces] = field(default_factory=dict)

    @property
    def wide_bytes(self) -> int:
        """Bytes of a number that is at least float32."""
        return max(self.dtype.itemsize, 4)

    def rotation(self, rope: Rope) -> Rotation:
        """Return the rotations of this step's tokens, computed once for all layers."""
        if rope not in self.rotations:
            self.rotations[rope] = Rotation(rope, self.positions, self.dtype)
        return self.rotations[rope]

    def state_places(self, num_before: int) -> StatePlaces:
        """Return where tokens stand that look back on ``num_before`` inputs, once for all layers.

        The first part is None where nothing decodes, the second where nothing prefills.
        """
        if num_before not in self.places:
            group = self.groups[MAMBA]
            decode, prefill = group.of(MambaMetadata).decode, group.of(MambaMetadata).prefill
            self.places[num_before] = (
                DecodePlaces(decode, group.common) if decode.num_tokens else None,
                PrefillPlaces(prefill, group.common, self.req_of_token, num_before)
                if prefill.num_tokens
                else None,
            )
        return self.places[num_before]
