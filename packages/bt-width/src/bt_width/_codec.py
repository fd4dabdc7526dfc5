"""A layout as JSON and back; it knows the fields, and nothing of what they mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from .errors import InvalidSpecError, shown
from .limits import ContextParallel, ServingLimits
from .specs import (
    AttentionSpec,
    CacheSpec,
    LayerSpec,
    MambaSpec,
    RingSpec,
    SlidingWindowSpec,
    UniformSpec,
)

if TYPE_CHECKING:
    from .layout import BlockTableLayout

VERSION = 1

_TYPE_OF_TAG: dict[str, type[LayerSpec]] = {
    "attention": AttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "mamba": MambaSpec,
    "ring": RingSpec,
}
_TAG_OF_TYPE = {spec_type: tag for tag, spec_type in _TYPE_OF_TAG.items()}


class LayoutFields(TypedDict):
    """The causes that a layout stores."""

    spec: CacheSpec
    limits: ServingLimits
    kernel_block_size: int


def layout_to_json(layout: BlockTableLayout) -> str:
    """Return ``layout`` as JSON with sorted keys."""
    return json.dumps(_encode_layout(layout), sort_keys=True)


def layout_digest(layout: BlockTableLayout) -> str:
    """Return the SHA-256 of ``layout`` as JSON, without the context-parallel rank."""
    encoded = _encode_layout(layout)
    del encoded["limits"]["context_parallel"]["rank"]
    return hashlib.sha256(json.dumps(encoded, sort_keys=True).encode()).hexdigest()


def layout_fields_from_json(text: str) -> LayoutFields:
    """Return the causes in ``text``."""
    try:
        decoded = json.loads(text, object_pairs_hook=_without_duplicates)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSpecError(f"a layout must be JSON text: {error}") from error
    record = _take_fields("layout", decoded, {"version", "spec", "limits", "kernel_block_size"})
    if type(record["version"]) is not int or record["version"] != VERSION:
        raise InvalidSpecError(
            f"layout version {shown(record['version'])} is not the {VERSION} read here; "
            "both processes must run the same bt-width",
            version=record["version"],
        )
    return LayoutFields(
        spec=_decode_spec(record["spec"]),
        limits=_decode_limits(record["limits"]),
        kernel_block_size=record["kernel_block_size"],
    )


def _encode_layout(layout: BlockTableLayout) -> dict[str, Any]:
    return {
        "version": VERSION,
        "spec": _encode_spec(layout.spec),
        "limits": dataclasses.asdict(layout.limits),
        "kernel_block_size": layout.kernel_block_size,
    }


def _encode_spec(spec: CacheSpec) -> dict[str, Any]:
    if isinstance(spec, UniformSpec):
        members = {name: _encode_spec(member) for name, member in spec.members}
        return {"kind": "uniform", "members": members}
    return {"kind": _TAG_OF_TYPE[type(spec)], **dataclasses.asdict(spec)}


def _decode_spec(value: object) -> CacheSpec:
    if isinstance(value, dict) and value.get("kind") == "uniform":
        members = _take_fields("spec", value, {"kind", "members"})["members"]
        if not isinstance(members, dict):
            raise InvalidSpecError(f"members must be a JSON object, not {shown(members)}")
        return UniformSpec(members={name: _decode_layer(spec) for name, spec in members.items()})
    return _decode_layer(value)


def _decode_layer(value: object) -> LayerSpec:
    kind = value.get("kind") if isinstance(value, dict) else None
    spec_type = _TYPE_OF_TAG.get(kind) if isinstance(kind, str) else None
    if spec_type is None:
        raise InvalidSpecError(
            f"a spec's kind must be one of {sorted(_TYPE_OF_TAG)}, got {shown(kind)}", kind=kind
        )
    names = _field_names(spec_type)
    record = _take_fields(f"spec {shown(kind)}", value, names | {"kind"})
    return spec_type(**{name: record[name] for name in names})


def _decode_limits(value: object) -> ServingLimits:
    record = _take_fields("limits", value, _field_names(ServingLimits))
    context = _take_fields(
        "context_parallel", record["context_parallel"], _field_names(ContextParallel)
    )
    return ServingLimits(**{**record, "context_parallel": ContextParallel(**context)})


def _field_names(record_type: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record_type)}


def _take_fields(what: str, value: object, names: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidSpecError(f"{what} must be a JSON object, not {shown(value)}")
    unknown, missing = sorted(value.keys() - names), sorted(names - value.keys())
    if unknown or missing:
        problems = [f"has the unknown fields {shown(unknown)}"] if unknown else []
        problems += [f"lacks {shown(missing)}"] if missing else []
        raise InvalidSpecError(
            f"{what} {' and '.join(problems)}; both processes must run the same bt-width",
            unknown=unknown,
            missing=missing,
        )
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError(f"a name occurs twice in {shown([name for name, _ in pairs])}")
    return record
