"""What bt-builders hands out: made by keyword, never changed, without room for anything else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
from tests.support.value_classes import value_classes

import bt_builders

pytestmark = pytest.mark.fast

CLASSES = value_classes(bt_builders)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_value_is_made_by_keyword_and_never_changed(cls: type) -> None:
    value: object = object.__new__(cls)

    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(cls)[0].name, 0)
    assert all(field.kw_only for field in fields(cls))
    assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_metadata_is_compared_by_identity(cls: type) -> None:
    """Its tensors have no single answer to ``==``; what is configured has one."""
    holds_tensors = any("Tensor" in str(field.type) for field in fields(cls))
    is_metadata = holds_tensors or cls.__name__.endswith("Metadata")

    assert ("__eq__" in vars(cls)) != is_metadata
