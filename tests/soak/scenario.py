"""Scenarios drawn at random: cache groups of every kind, limits and ranks; no traffic."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bt_builders import (
    AttentionBackend,
    AttentionGroup,
    BuilderClass,
    DSAIndexerMetadataBuilder,
    DSAOptions,
    MambaMetadataBuilder,
    MLAMetadataBuilder,
    RingTailMetadataBuilder,
)
from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    MultipleOf,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
    UniformSpec,
)

LATENT, INDEX = "latent", "index"

_GROUP_NAMES = (LATENT, INDEX, "replicated", "window", "ring", "state", "states")
_INDEXER = DSAIndexerMetadataBuilder.configured(DSAOptions(member=INDEX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is served and how.

    Attributes:
        groups: The cache groups.
        limits: Of the first rank.
        spare: How much of the room for all requests the pools have beyond one's, 0 to 1.
        acceptance: The share of drafts that turn out right.
        max_steps_in_flight: Steps that may be launched before the first has ended.
    """

    groups: tuple[AttentionGroup, ...]
    limits: ServingLimits
    spare: float
    acceptance: float
    max_steps_in_flight: int

    @property
    def names(self) -> tuple[str, ...]:
        """What the groups are called."""
        return tuple(group.name for group in self.groups)

    def num_blocks(self, layouts: tuple[BlockTableLayout, ...]) -> tuple[int, ...]:
        """Return the blocks of each pool: room for the longest request, and some to spare.

        Where a request holds as much from its first token to its last there is room for all,
        so that many run until blocks for their tokens are short.
        """
        sizes = []
        for layout in layouts:
            needed = layout.max_resident_blocks(self.limits.max_num_batched_tokens)
            others = needed * (self.limits.max_num_reqs - 1)
            spare = 1.0 if layout.kind in ("mamba", "ring") else self.spare
            sizes.append(1 + needed + round(spare * others))
        return tuple(sizes)


def every_kind() -> Scenario:
    """Return the scenario in which every kind of group is served at once."""
    draw = random.Random(0)
    limits = ServingLimits(
        max_model_len=300,
        max_num_reqs=8,
        max_num_batched_tokens=64,
        num_speculative_tokens=3,
        context_parallel=ContextParallel(size=2, interleave=4),
    )
    return Scenario(
        groups=tuple(_group(draw, name, limits) for name in _GROUP_NAMES),
        limits=limits,
        spare=0.2,
        acceptance=0.7,
        max_steps_in_flight=2,
    )


def draw_scenario(draw: random.Random) -> Scenario:
    """Draw a scenario."""
    num_drafts = draw.choice([0, 1, 2, 3])
    limits = ServingLimits(
        max_model_len=draw.randint(100, 400),
        max_num_reqs=draw.randint(2, 12),
        max_num_batched_tokens=draw.choice([num_drafts + 1, 16, 48, 128]),
        num_speculative_tokens=num_drafts,
        lookahead_tokens=draw.choice([0, num_drafts]),
        context_parallel=ContextParallel(
            size=draw.choice([1, 2, 3]), interleave=draw.choice([1, 2, 4, 8])
        ),
    )
    chosen = draw.sample(_GROUP_NAMES, draw.randint(2, 5))
    return Scenario(
        groups=tuple(_group(draw, name, limits) for name in chosen),
        limits=limits,
        spare=draw.choice([0.0, 0.2, 0.4, 1.0]),
        acceptance=draw.choice([0.0, 0.5, 0.8, 1.0]),
        max_steps_in_flight=draw.choice([1, 2]),
    )


def _group(draw: random.Random, name: str, limits: ServingLimits) -> AttentionGroup:
    block_size = draw.choice([8, 16, 24, 32])
    kernel_block_size = draw.choice([4, 8])
    alignment = draw.choice([None, 32, 128])
    num_drafts = limits.num_speculative_tokens
    builders: tuple[BuilderClass, ...] = (MLAMetadataBuilder,)
    spec: CacheSpec
    match name:
        case "latent" | "replicated":
            spec = AttentionSpec(
                block_size=block_size, sharded=name == LATENT, token_alignment=alignment
            )
        case "index":
            latent = AttentionSpec(block_size=block_size, token_alignment=alignment)
            index = AttentionSpec(
                block_size=block_size,
                token_alignment=alignment,
                tokens_per_state=_tokens_per_state(draw, limits),
            )
            spec = UniformSpec(members={LATENT: latent, INDEX: index})
            builders = (MLAMetadataBuilder, _INDEXER)
        case "window":
            spec = SlidingWindowSpec(
                block_size=block_size,
                window=draw.choice([1, 9, 32, 100]),
                extra_retained_tokens=num_drafts,
                token_alignment=alignment,
            )
        case "ring":
            spec = RingSpec(block_size=draw.choice([4, 7, 16]))
            builders = (RingTailMetadataBuilder,)
        case _:
            spec = MambaSpec(
                block_size=draw.choice([4, 8, 24]),
                mode="none" if name == "state" else "align",
                num_speculative_blocks=num_drafts,
            )
            builders = (MambaMetadataBuilder,)
    return AttentionGroup(
        name=name, spec=spec, backends=_backends(draw, builders, kernel_block_size)
    )


def _tokens_per_state(draw: random.Random, limits: ServingLimits) -> int:
    context = limits.context_parallel
    sizes = [1, 2, 4]
    # a state's tokens lie on one rank
    fitting = [size for size in sizes if context.size == 1 or context.interleave % size == 0]
    return draw.choice(fitting)


def _backends(
    draw: random.Random, builders: tuple[BuilderClass, ...], kernel_block_size: int
) -> tuple[AttentionBackend, ...]:
    splits = builders[0] is MLAMetadataBuilder
    return tuple(
        AttentionBackend(
            name=f"backend {place}",
            builder_class=builder,
            supported_kernel_block_sizes=(kernel_block_size if splits else MultipleOf(1),),
            span=draw.choice([None, 48]) if splits else None,
            span_unit="states" if builder is _INDEXER else "tokens",
        )
        for place, builder in enumerate(builders)
    )
