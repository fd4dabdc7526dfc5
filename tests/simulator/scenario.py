"""Scenarios drawn at random: limits, pools, cache groups of every kind and ranks; no traffic."""

from __future__ import annotations

import random
from collections.abc import Sequence
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

SHARED_KINDS = (LATENT, INDEX, "replicated", "window", "states")
"""Groups whose blocks requests can share."""

EVERY_KIND = (*SHARED_KINDS, "ring")
_ALL_NAMES = (*EVERY_KIND, "state")

_INDEXER = DSAIndexerMetadataBuilder.configured(DSAOptions(member=INDEX))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What scenarios are drawn from.

    Attributes:
        max_model_len: The least and the most of the longest request's tokens.
        max_num_reqs: The least and the most of the requests that run.
        budgets: Tokens of a step.
        num_drafts: Guesses that a decode verifies.
        block_sizes: Tokens that blocks are multiples of.
        num_ranks: Context-parallel ranks.
        prompt_lens: The most tokens of a prompt, one for each kind of request.
        answer_lens: The most tokens of an answer, alike.
    """

    max_model_len: tuple[int, int]
    max_num_reqs: tuple[int, int]
    budgets: tuple[int, ...]
    num_drafts: tuple[int, ...]
    block_sizes: tuple[int, ...]
    num_ranks: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    answer_lens: tuple[int, ...]


LARGE = Scale(
    max_model_len=(100, 400),
    max_num_reqs=(2, 12),
    budgets=(4, 16, 48, 128),
    num_drafts=(0, 1, 2, 3),
    block_sizes=(8, 12, 16),
    num_ranks=(1, 2, 3),
    prompt_lens=(1, 8, 40, 400),
    answer_lens=(1, 30, 200),
)
SMALL = Scale(
    max_model_len=(60, 96),
    max_num_reqs=(3, 5),
    budgets=(7, 16, 40),
    num_drafts=(0, 0, 1, 3),
    block_sizes=(2, 2, 4),
    num_ranks=(1, 1, 1, 2, 3),
    prompt_lens=(8, 45, 45),
    answer_lens=(12, 30),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How requests are served, whatever the model.

    Attributes:
        limits: Of the first rank.
        scale: What it was drawn from: it bounds requests, too.
        spare: How much of the room for all requests the pools have beyond one's, 0 to 1.
        spare_states: The same where a request holds as much from its first token to its last:
            with room for all, many run until blocks for their tokens are short.
        acceptance: The share of drafts that are right.
        is_ragged: Whether fewer drafts are proposed than asked, now and then.
        max_steps_in_flight: Steps that may be launched before the first has ended.
        batch_sizes: Requests of captured steps.
        prefix_caching: Whether requests share blocks.
    """

    limits: ServingLimits
    scale: Scale
    spare: float
    spare_states: float
    acceptance: float
    is_ragged: bool
    max_steps_in_flight: int
    batch_sizes: tuple[int, ...]
    prefix_caching: bool

    def num_blocks(self, layouts: Sequence[BlockTableLayout]) -> tuple[int, ...]:
        """Return the blocks of each pool: room for the longest request, and some to spare."""
        sizes = []
        for layout in layouts:
            needed = layout.max_resident_blocks(self.limits.max_num_batched_tokens)
            others = needed * (self.limits.max_num_reqs - 1)
            spare = self.spare if layout.slot_mode == "block" else self.spare_states
            sizes.append(1 + needed + round(spare * others))
        return tuple(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesScenario:
    """Cache groups of any kind, served by a model that computes names.

    Attributes:
        serving: How requests are served.
        groups: The cache groups.
        is_checked: Whether the tables of each step are checked too, and not names alone.
    """

    serving: Serving
    groups: tuple[AttentionGroup, ...]
    is_checked: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """What the groups are called."""
        return tuple(group.name for group in self.groups)


def of_kinds(names: Sequence[str], scale: Scale, *, num_ranks: int = 2) -> NamesScenario:
    """Return the scenario that serves groups of some kinds at once; every call gives the same."""
    draw = random.Random(0)
    unit = scale.block_sizes[0]
    limits = ServingLimits(
        max_model_len=scale.max_model_len[1] * 3 // 4,
        max_num_reqs=scale.max_num_reqs[1],
        max_num_batched_tokens=scale.budgets[-1] // 2,
        num_speculative_tokens=3,
        context_parallel=ContextParallel(size=num_ranks, interleave=unit // 2),
    )
    serving = Serving(
        limits=limits,
        scale=scale,
        spare=0.1,
        spare_states=1.0,
        acceptance=0.7,
        is_ragged=True,
        max_steps_in_flight=1,
        batch_sizes=(2, limits.max_num_reqs),
        prefix_caching=True,
    )
    groups = tuple(_group(draw, name, limits, unit) for name in names)
    return NamesScenario(serving=serving, groups=groups)


def draw_scenario(draw: random.Random, scale: Scale, kinds: Sequence[str] = ()) -> NamesScenario:
    """Draw a scenario, with groups of all ``kinds`` or of some; most can share blocks."""
    unit = draw.choice(scale.block_sizes)
    serving = draw_serving(draw, scale, unit)
    names = draw.choice([_ALL_NAMES, *[SHARED_KINDS] * 4])
    chosen = list(kinds) or draw.sample(names, draw.randint(1, 4))
    if serving.limits.num_speculative_tokens and {"state", "states"} <= set(chosen):
        # a batch has one number of accepted tokens, whose states the groups keep alike
        chosen.remove("state")
    groups = tuple(_group(draw, name, serving.limits, unit) for name in chosen)
    return NamesScenario(serving=serving, groups=groups)


def draw_serving(draw: random.Random, scale: Scale, unit: int) -> Serving:
    """Draw how requests are served, where blocks are multiples of ``unit`` tokens."""
    num_drafts = draw.choice(scale.num_drafts)
    limits = ServingLimits(
        max_model_len=draw.randint(*scale.max_model_len),
        max_num_reqs=draw.randint(*scale.max_num_reqs),
        max_num_batched_tokens=max(draw.choice(scale.budgets), num_drafts + 1),
        num_speculative_tokens=num_drafts,
        lookahead_tokens=draw.choice([0, num_drafts]),
        context_parallel=ContextParallel(
            size=draw.choice(scale.num_ranks), interleave=draw.choice(_divisors(unit))
        ),
    )
    return Serving(
        limits=limits,
        scale=scale,
        spare=draw.choice([0.0, 0.0, 0.2, 0.5, 1.0]),
        spare_states=draw.choice([0.0, 0.5, 1.0, 1.0]),
        acceptance=draw.choice([0.0, 0.5, 0.8, 1.0]),
        is_ragged=draw.random() < 0.5,
        # with drafts the engine's loop waits for each step
        max_steps_in_flight=1 if num_drafts else draw.choice([1, 2]),
        batch_sizes=draw.choice([(), (), (2, limits.max_num_reqs)]),
        prefix_caching=draw.random() < 0.9,
    )


def draw_block_size(draw: random.Random, unit: int) -> int:
    """Draw a block size that other groups' blocks do not miss by much."""
    return unit * draw.choice([1, 1, 1, 1, 2, 3])


def _divisors(number: int) -> list[int]:
    return [size for size in (1, 2, 4, 8) if number % size == 0]


def _group(draw: random.Random, name: str, limits: ServingLimits, unit: int) -> AttentionGroup:
    block_size = draw_block_size(draw, unit)
    kernel_block_size = draw.choice([size for size in (unit, unit // 2) if size > 1])
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
                tokens_per_state=_tokens_per_state(draw, limits, kernel_block_size),
            )
            spec = UniformSpec(members={LATENT: latent, INDEX: index})
            builders = (MLAMetadataBuilder, _INDEXER)
        case "window":
            spec = SlidingWindowSpec(
                block_size=block_size,
                window=draw.choice([1, 2, 9, 17, 32, 100]),
                extra_retained_tokens=num_drafts,
                token_alignment=alignment,
            )
        case "ring":
            spec = RingSpec(block_size=draw.choice([4, 7, 16]))
            builders = (RingTailMetadataBuilder,)
        case _:
            # a decode's states lie in one block's reach
            least = -(-(1 + num_drafts) // unit) * unit
            spec = MambaSpec(
                block_size=max(block_size, least),
                mode="none" if name == "state" else "align",
                num_speculative_blocks=num_drafts,
            )
            builders = (MambaMetadataBuilder,)
    return AttentionGroup(
        name=name, spec=spec, backends=_backends(draw, builders, kernel_block_size)
    )


def _tokens_per_state(draw: random.Random, limits: ServingLimits, kernel_block_size: int) -> int:
    context = limits.context_parallel
    # a state's tokens lie in one kernel block of one rank
    whole = context.interleave if context.size > 1 else kernel_block_size
    fitting = [size for size in _divisors(kernel_block_size) if whole % size == 0]
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
