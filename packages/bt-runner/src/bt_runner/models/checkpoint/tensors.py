"""A checkpoint's tensors: every name and shape is checked before the first one is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import ModuleType

import torch
from torch import Tensor

from bt_runner.errors import BadInputError
from bt_runner.files import open_file
from bt_runner.memory import require_memory
from bt_runner.models.checkpoint.families import MAX_LAYERS
from bt_runner.models.checkpoint.fields import Fields
from bt_runner.models.config import AttentionLayer, ModelConfig, SelectShared
from bt_runner.models.weights import head_of, tensor_dtype, tensor_shapes
from bt_width.errors import shown

_READ_DTYPES = ("F64", "F32", "F16", "BF16")
_OLDER_NAMES = {"backbone.embeddings.weight": "backbone.embedding.weight"}
_OTHER_FORMATS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
_MAX_INDEX_BYTES = 2**28
_MAX_FILES = 100_000
_FREQUENCIES = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class _Stored:
    file: Path
    name: str
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
    shapes = tensor_shapes(config)
    stored = _headers(safetensors, directory)
    for name, older in _OLDER_NAMES.items():
        if name in shapes and name not in stored and older in stored:
            stored[name] = stored.pop(older)
    _add_head_of_its_own(stored, shapes, config)
    _check(stored, shapes, _unused(directory, config, stored), directory)
    num_bytes = sum(
        math.prod(shape) * tensor_dtype(name, dtype).itemsize for name, shape in shapes.items()
    )
    require_memory(f"the weights in {directory}", num_bytes, device)
    weights = {}
    with ExitStack() as files:
        opened = {
            file: files.enter_context(safetensors.safe_open(file, framework="pt"))
            for file in sorted({tensor.file for tensor in stored.values()})
        }
        for name in shapes:
            tensor = opened[stored[name].file].get_tensor(stored[name].name)
            _require_finite(name, tensor, directory)
            weights[name] = tensor.to(device=device, dtype=tensor_dtype(name, dtype))
    names = config.names
    if names.is_tied and torch.equal(head_of(config, weights), weights[names.embedding]):
        weights.pop(names.head, None)
    return weights


def _add_head_of_its_own(
    stored: dict[str, _Stored], shapes: dict[str, tuple[int, ...]], config: ModelConfig
) -> None:
    """Take a tied head that is stored into account: transformers unties one that differs."""
    names = config.names
    if names.is_tied and names.head in stored:
        if names.embedding in stored:
            shapes[names.head] = shapes[names.embedding]
        else:
            stored[names.embedding] = stored.pop(names.head)


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
        open_file(file).close()
        try:
            with safetensors.safe_open(file, framework="pt") as header:
                for name in header.keys():  # noqa: SIM118 (it is not a mapping)
                    tensor = header.get_slice(name)
                    if name in stored:
                        raise BadInputError(
                            f"{name:.200} lies in two files of {directory}", name=name
                        )
                    stored[name] = _Stored(
                        file, name, tuple(tensor.get_shape()), tensor.get_dtype()
                    )
        except (OSError, safetensors.SafetensorError) as error:
            raise BadInputError(f"cannot read {file}: {error!s:.300}", path=str(file)) from error
    return stored


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [_only_file(directory)]
    weight_map = Fields.read(index, _MAX_INDEX_BYTES).raw("weight_map")
    if not isinstance(weight_map, dict):
        raise BadInputError(f"{index} has no weight_map", path=str(index))
    names = set(map(str, weight_map.values()))
    if len(names) > _MAX_FILES:
        raise BadInputError(f"{index} names {len(names):,} files", num_files=len(names))
    for name in names:
        path = PurePath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise BadInputError(
                f"{index} names {shown(name)}, which is not a file of its folder; nothing outside "
                "is opened",
                file=name,
            )
    return sorted(directory / name for name in names)


def _only_file(directory: Path) -> Path:
    file = directory / "model.safetensors"
    others = [name for name in _OTHER_FORMATS if (directory / name).is_file()]
    if others and not file.exists():
        raise BadInputError(
            f"{directory} holds {others[0]} and no model.safetensors, and only safetensors are "
            "read: load it with transformers and write it anew with save_pretrained",
            path=str(directory),
        )
    return file


def _unused(directory: Path, config: ModelConfig, stored: Mapping[str, _Stored]) -> tuple[str, ...]:
    """Return what the names of tensors begin with that may be there without any use."""
    names = config.names
    # layers that predict further tokens follow on the model's own
    fields = Fields.read(directory / "config.json")
    count = min(fields.get("num_nextn_predict_layers", int, 0), MAX_LAYERS)
    first = last = len(config.layers)
    while last < first + count or f"{names.layer(last)}eh_proj.weight" in stored:
        last += 1
    prefixes = [names.layer(index) for index in range(first, last)]
    # a layer that shares a choice may be stored with the indexer that it does not run
    prefixes += [
        f"{names.layer(index)}self_attn.indexer."
        for index, layer in enumerate(config.layers)
        if isinstance(layer, AttentionLayer) and isinstance(layer.selection, SelectShared)
    ]
    return tuple(prefixes)


def _require_finite(name: str, tensor: Tensor, directory: Path) -> None:
    # a sum is not finite where one of its terms is not
    if not tensor.sum(dtype=torch.float64).isfinite():
        raise BadInputError(
            f"{name} in {directory} holds NaN or infinity: the checkpoint is damaged", name=name
        )


def _check(
    stored: Mapping[str, _Stored],
    shapes: Mapping[str, tuple[int, ...]],
    unused: tuple[str, ...],
    directory: Path,
) -> None:
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise BadInputError(f"{directory} lacks {_first_and_count(missing)}", names=missing)
    # frequencies are computed, whatever is stored
    unknown = [
        name
        for name in stored
        if name not in shapes and not name.startswith(unused) and not name.endswith(_FREQUENCIES)
    ]
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
    first = f"{names[0]:.200}"
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"
