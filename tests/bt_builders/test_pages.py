"""The builders that a page shows are builders: they build a batch's metadata."""

from typing import Any, cast

from tests.support.batches import Request, make_batch
from tests.support.pages import as_program
from tests.support.plans import plan
from tests.support.source_trees import ROOT

from bt_builders import BuilderClass, create_metadata_builders
from bt_width import AttentionSpec


def test_the_pages_builders_build() -> None:
    program, _ = as_program((ROOT / "docs" / "write-a-builder.md").read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "page"}
    exec(program, names)
    layout = plan(AttentionSpec(block_size=16), 200)
    classes = cast(list[BuilderClass], [names["LastBlocksBuilder"], names["ExpandingBuilder"]])
    common = make_batch(layout, [Request(40, 2), Request(16, 1)])

    built: list[Any] = [
        builder.build(common) for builder in create_metadata_builders(layout, classes, "cpu")[0]
    ]

    assert built[0].ids.tolist() == [3, 4]
    assert built[1].tolist() == common.block_table[[0, 0, 1]].tolist()
