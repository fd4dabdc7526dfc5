"""A checkpoint's tensors: every name and shape is checked before the first one is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import ModelConfig
from bt_runner.models.weights import tensor_dtype, tensor_shapes

_READ_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class _Stored:
    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_weights(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Return the tensors that ``config`` calls for, from ``*.safetensors``, single or sharded.

    Layers above the model's own that only predict further tokens are left out.

    Raises:
        BadInputError: A file is missing or broken, or the files lack a tensor, hold one too many,
            or hold one of another shape or of a quantized dtype; nothing is allocated then.
    """
    safetensors = _safetensors()
    stored = _headers(safetensors, directory)
    shapes = tensor_shapes(config)
    _check(stored, shapes, _extra_layers(directory, config), directory)
    weights = {}
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safetensors.safe_open(file, framework="pt"))
            for file in sorted({stored[name].file for name in shapes})
        }
        for name in shapes:
            tensor = opened[stored[name].file].get_tensor(name)
            weights[name] = tensor.to(device=device, dtype=tensor_dtype(name, dtype))
    return weights


def _safetensors() -> ModuleType:
    try:
        import safetensors
    except ImportError as error:
        raise BadInputError(
            "checkpoints are read with safetensors; install it with `pip install 'bt-runner[hf]'`"
        ) from error
    return safetensors


def _headers(safetensors: ModuleType, directory: Path) -> dict[str, _Stored]:
    """Return where every tensor lies, its shape and its dtype, from the files' headers alone."""
    stored: dict[str, _Stored] = {}
    for file in _files(directory):
        try:
            with safetensors.safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 (it is not a mapping)
                    tensor = header.get_slice(name)
                    if name in stored:
                        raise BadInputError(f"{name} lies in two files of {directory}", name=name)
                    stored[name] = _Stored(file, tuple(tensor.get_shape()), tensor.get_dtype())
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInputError(f"cannot read {file}: {error}", path=str(file)) from error
    return stored


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    weight_map = Fields.read(index).raw("weight_map")
    if not isinstance(weight_map, dict):
        raise BadInputError(f"{index} has no weight_map", path=str(index))
    return sorted({directory / str(file) for file in weight_map.values()})


def _extra_layers(directory: Path, config: ModelConfig) -> tuple[str, ...]:
    count = Fields.read(directory / "config.json").get("num_nextn_predict_layers", int, 0)
    return tuple(config.names.layer(len(config.layers) + extra) for extra in range(count))


def _check(
    stored: Mapping[str, _Stored],
    shapes: Mapping[str, tuple[int, ...]],
    extra_layers: tuple[str, ...],
    directory: Path,
) -> None:
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise BadInputError(f"{directory} lacks {_first_and_count(missing)}", names=missing)
    unknown = [name for name in stored if name not in shapes and not name.startswith(extra_layers)]
    if unknown:
        raise BadInputError(
            f"{directory} holds {_first_and_count(unknown)}, which its configuration does not "
            "call for",
            names=unknown,
        )
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise BadInputError(
                f"{name} has shape {list(stored[name].shape)} in {directory}, and its "
                f"configuration calls for {list(shape)}",
                name=name,
                shape=stored[name].shape,
                expected=shape,
            )
        if stored[name].dtype not in _READ_DTYPES:
            raise BadInputError(
                f"{name} is stored as {stored[name].dtype} in {directory}; only "
                f"{', '.join(_READ_DTYPES)} are read",
                name=name,
                dtype=stored[name].dtype,
            )


def _first_and_count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
