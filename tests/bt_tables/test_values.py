"""What bt-tables hands out: made by keyword, never changed, without room for anything else."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
from tests.support.value_classes import value_classes

import bt_tables

pytestmark = pytest.mark.fast

CLASSES = value_classes(bt_tables)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_value_is_made_by_keyword_and_never_changed(cls: type) -> None:
    value: object = object.__new__(cls)

    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(cls)[0].name, 0)
    assert all(field.kw_only for field in fields(cls))
    assert not hasattr(value, "__dict__")
