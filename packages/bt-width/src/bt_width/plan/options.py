"""The options that say which model is planned, for which limits, and how its caches are cut."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidSpecError
from ..layout import MAX_POSITION, BlockTableLayout
from ..limits import ContextParallel, ServingLimits
from ..models.groups import ModelGroup
from ..models.model import ModelCaches
from ..models.reader import read_model
from .config_file import read_config
from .planned import PlannedGroup
from .sizes import parse_length

_OPTIONS = {
    "max_model_len": "--max-model-len",
    "max_num_reqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "num_speculative_tokens": "--speculative-tokens",
    "num_speculative_blocks": "--speculative-tokens",
    "lookahead_tokens": "--lookahead-tokens",
    "context_parallel.size": "--dcp",
    "context_parallel.rank": "--dcp-rank",
    "context_parallel.interleave": "--interleave",
    "interleave": "--interleave",
    "tp": "--tp",
}
_OPTIONS_OF_BLOCKS = {
    "block_size": "--block-size",
    "kernel_block_size": "--kernel-block-size",
    "mamba_block_size": "--mamba-block-size",
}


def options_of_fields(args: argparse.Namespace) -> Mapping[str, str]:
    """Return the option that sets each field which an error may name.

    Groups that are given one by one say themselves how their blocks are cut.
    """
    cuts_blocks = not getattr(args, "groups", None)
    return _OPTIONS | _OPTIONS_OF_BLOCKS if cuts_blocks else _OPTIONS


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``model_of``, ``limits_of`` and ``groups_of`` read."""
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        metavar="FILE",
        help="a Hugging Face config.json, or its folder",
    )
    add_limit_options(parser)
    add_cut_options(parser)


def add_limit_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the limits."""
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-model-len",
        type=parse_length,
        metavar="TOKENS",
        help="the longest request, such as 131072, 128K or 1M, or auto: the longest that "
        "--memory holds (default: what the config says)",
    )
    _add_count(limits, "--max-num-seqs", 256, "REQUESTS", "requests of the largest batch")
    _add_count(
        limits,
        "--max-num-batched-tokens",
        8192,
        "TOKENS",
        "tokens of the largest step, drafts included",
    )
    _add_count(limits, "--speculative-tokens", 0, "TOKENS", "drafts of a request in a step")
    _add_count(
        limits,
        "--lookahead-tokens",
        0,
        "TOKENS",
        "tokens past the longest request that a step may still address",
    )
    _add_count(limits, "--dcp", 1, "RANKS", "context-parallel ranks, which share tokens")
    _add_count(limits, "--dcp-rank", 0, "RANK", "this rank")
    _add_count(limits, "--interleave", 1, "TOKENS", "tokens in a row that stay on one rank")


def add_cut_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the blocks and of their dtypes."""
    cut = parser.add_argument_group("blocks")
    _add_count(cut, "--block-size", 64, "TOKENS", "tokens of a block")
    cut.add_argument(
        "--kernel-block-size",
        type=int,
        metavar="TOKENS",
        help="the only size that attention kernels take (default: the block itself)",
    )
    cut.add_argument(
        "--mamba-block-size",
        type=int,
        metavar="TOKENS",
        help="tokens between two kept states (default: --block-size)",
    )
    cut.add_argument(
        "--mamba-mode",
        choices=("none", "align"),
        default="none",
        help="keep one state per request, or one at each block's end (default: none)",
    )
    cut.add_argument(
        "--cache-dtype",
        metavar="DTYPE",
        help="of keys, values and latents: torch's names, or auto, fp8, fp8_e4m3, fp8_e5m2, "
        "fp8_ds_mla, nvfp4 (default: auto, what the config declares, else the model's)",
    )
    cut.add_argument(
        "--model-dtype", metavar="DTYPE", help="the model's dtype (default: what the config says)"
    )
    cut.add_argument(
        "--state-dtype",
        metavar="DTYPE",
        help="of recurrent states (default: what the config says, else float32)",
    )


def _add_count(
    group: argparse._ArgumentGroup, name: str, default: int, unit: str, about: str
) -> None:
    group.add_argument(
        name, type=int, default=default, metavar=unit, help=f"{about} (default: {default})"
    )


def model_of(args: argparse.Namespace) -> ModelCaches:
    """Return the model of the config that the options name.

    Raises:
        UnknownModelError: What it keeps is not certain.
        InvalidSpecError: The file cannot be read, or a key is wrong.
    """
    return read_model(read_config(args.config))


def limits_of(args: argparse.Namespace, max_model_len: int) -> ServingLimits:
    """Return the limits that the options name, for requests of up to ``max_model_len``.

    Raises:
        InvalidSpecError: A limit is out of range.
    """
    return ServingLimits(
        max_model_len=max_model_len,
        max_num_reqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=args.speculative_tokens,
        lookahead_tokens=args.lookahead_tokens,
        context_parallel=ContextParallel(
            size=args.dcp, rank=args.dcp_rank, interleave=args.interleave
        ),
    )


def longest_of(args: argparse.Namespace, model: ModelCaches) -> int:
    """Return the longest request that the options or the config allow.

    Raises:
        InvalidSpecError: Neither says, or it is left to a memory that is not given.
    """
    if isinstance(args.max_model_len, int):
        return args.max_model_len
    is_auto = args.max_model_len == "auto"
    if is_auto and getattr(args, "memory", None) is None:
        raise InvalidSpecError("--max-model-len auto needs --memory", option="--max-model-len")
    if model.max_positions is None:
        if is_auto:
            return MAX_POSITION + 1
        raise InvalidSpecError(
            f"{args.config} lacks max_position_embeddings; give --max-model-len",
            key="max_position_embeddings",
        )
    return model.max_positions


def groups_of(
    args: argparse.Namespace, model: ModelCaches, *, tp: int = 1
) -> tuple[ModelGroup, ...]:
    """Return the cache groups of a model, cut as the options say.

    Raises:
        UnknownModelError: The bytes of something are not known.
        InvalidSpecError: An option is out of range, or does not suit the model.
    """
    return model.groups(
        block_size=args.block_size,
        cache_dtype=args.cache_dtype,
        model_dtype=args.model_dtype,
        state_dtype=args.state_dtype,
        tp=tp,
        num_speculative_tokens=args.speculative_tokens,
        mamba_block_size=args.mamba_block_size,
        mamba_mode=args.mamba_mode,
    )


def plan_groups(
    args: argparse.Namespace, groups: tuple[ModelGroup, ...], limits: ServingLimits
) -> tuple[PlannedGroup, ...]:
    """Plan each group with the kernel block that the options name.

    Raises:
        InvalidSpecError: A group and the limits do not go together.
    """

    def plan(group: ModelGroup) -> PlannedGroup:
        kernel = None if group.name == "mamba" else args.kernel_block_size
        try:
            layout = BlockTableLayout.plan(group.spec, limits, kernel)
        except InvalidSpecError as error:
            raise InvalidSpecError(f"group {group.name}: {error}", **error.details) from error
        return PlannedGroup(name=group.name, layout=layout, group=group)

    return tuple(plan(group) for group in groups)
