"""What the options mean: a geometry, its limits, and its cache groups."""

from __future__ import annotations

import argparse

from bt_runner.errors import BadInputError
from bt_runner.geometry.caches import ModelGeometry
from bt_runner.geometry.families import read_geometry
from bt_runner.geometry.groups import CutOptions, GeometryGroup, geometry_groups
from bt_runner.models.checkpoint.fields import Fields
from bt_width import ContextParallel, ServingLimits


def geometry_of(args: argparse.Namespace) -> ModelGeometry:
    """Return the geometry of the config that the options name.

    Raises:
        BadInputError: The file cannot be read, or does not say what its caches are.
    """
    return read_geometry(Fields.read(args.config))


def limits_of(args: argparse.Namespace, geometry: ModelGeometry) -> ServingLimits:
    """Return the limits that the options name.

    Raises:
        BadInputError: Neither an option nor the config says how long a request may be.
        InvalidSpecError: A limit is out of range.
    """
    longest = geometry.max_positions if args.max_model_len is None else args.max_model_len
    if longest is None:
        raise BadInputError(
            f"{args.config} lacks max_position_embeddings; give --max-model-len",
            field="max_position_embeddings",
        )
    return ServingLimits(
        max_model_len=longest,
        max_num_reqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=args.speculative_tokens,
        lookahead_tokens=args.lookahead_tokens,
        context_parallel=ContextParallel(
            size=args.dcp, rank=args.dcp_rank, interleave=args.interleave
        ),
    )


def groups_of(args: argparse.Namespace, geometry: ModelGeometry) -> tuple[GeometryGroup, ...]:
    """Return the cache groups of a model, cut as the options say.

    Raises:
        BadInputError: A dtype has no known size.
        InvalidSpecError: A block size is out of range.
    """
    options = CutOptions(
        block_size=args.block_size,
        kernel_block_size=args.kernel_block_size,
        mamba_block_size=args.mamba_block_size,
        mamba_mode=args.mamba_mode,
        num_speculative_blocks=args.speculative_tokens,
        cache_dtype=args.cache_dtype,
    )
    return geometry_groups(geometry, options)
