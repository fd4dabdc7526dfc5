"""The options that say which model is planned, for which limits, and how its caches are cut."""

from __future__ import annotations

import argparse
from pathlib import Path

from bt_runner.errors import BadInputError
from bt_runner.geometry.caches import ModelGeometry
from bt_runner.geometry.families import read_geometry
from bt_runner.geometry.groups import CutOptions, GeometryGroup, geometry_groups
from bt_runner.models.checkpoint.fields import Fields
from bt_width import ContextParallel, ServingLimits


def add_geometry_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--config", type=Path, required=True, metavar="FILE", help="a Hugging Face config.json"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="the longest request (default: the config's max_position_embeddings)",
    )
    limits.add_argument("--max-num-seqs", type=int, default=256, metavar="REQUESTS")
    limits.add_argument("--max-num-batched-tokens", type=int, default=8192, metavar="TOKENS")
    limits.add_argument("--speculative-tokens", type=int, default=0, metavar="TOKENS")
    limits.add_argument("--lookahead-tokens", type=int, default=0, metavar="TOKENS")
    limits.add_argument("--dcp", type=int, default=1, metavar="RANKS", help="context-parallel ranks")
    limits.add_argument("--dcp-rank", type=int, default=0, metavar="RANK", help="this rank")
    limits.add_argument("--interleave", type=int, default=1, metavar="TOKENS")
    cut = parser.add_argument_group("blocks")
    cut.add_argument("--block-size", type=int, default=64, metavar="TOKENS")
    cut.add_argument(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="the only size that attention kernels take (default: any)",
    )
    cut.add_argument(
        "--mamba-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens between two kept states (default: --block-size)",
    )
    cut.add_argument("--mamba-mode", choices=("none", "align"), default="none")
    cut.add_argument(
        "--cache-dtype", metavar="DTYPE", help="of keys, values and latents (default: the model's)"
    )


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
