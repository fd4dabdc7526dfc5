"""The width goes to the builders that ask for it, and to no other."""

from typing import ClassVar, Literal, cast

import pytest
import torch
from tests.support.plans import plan

from bt_builders import (
    BuilderClass,
    CommonAttentionMetadata,
    CudagraphSupport,
    DSAIndexerMetadataBuilder,
    MLAMetadataBuilder,
    create_metadata_builders,
)
from bt_builders.protocol import least_cudagraph_support
from bt_width import AttentionSpec, BlockTableLayout, BlockTableWidth, InvalidSpecError

pytestmark = pytest.mark.fast


class Asking:
    requires_block_table_width: ClassVar[Literal[True]] = True
    cudagraph_support: ClassVar[Literal["single"]] = "single"

    def __init__(
        self,
        layout: BlockTableLayout,
        device: torch.device,
        *,
        block_table_width: BlockTableWidth,
    ) -> None:
        self.layout = layout
        self.width = block_table_width

    def build(self, common: CommonAttentionMetadata) -> int:
        return common.num_reqs


class Plain:
    requires_block_table_width: ClassVar[Literal[False]] = False
    cudagraph_support: ClassVar[Literal["always"]] = "always"

    def __init__(self, layout: BlockTableLayout, device: torch.device) -> None:
        self.layout = layout

    def build(self, common: CommonAttentionMetadata) -> int:
        return common.num_reqs


LAYOUT = plan(AttentionSpec(block_size=16), 200)


def refused(builder_class: object) -> BuilderClass:
    """What the type checker refuses, and somebody without one hands over all the same."""
    return cast(BuilderClass, builder_class)


def test_only_those_that_ask_get_the_width() -> None:
    ((asking, plain),) = create_metadata_builders(LAYOUT, [Asking, Plain], "cpu")

    assert isinstance(asking, Asking)
    assert asking.width == LAYOUT.width
    assert isinstance(plain, Plain)


def test_every_builder_holds_the_layout_itself() -> None:
    classes: list[BuilderClass] = [Asking, Plain, DSAIndexerMetadataBuilder, MLAMetadataBuilder]

    builders = create_metadata_builders(LAYOUT, classes, "cpu", num_ubatches=2)

    layouts = [getattr(builder, "layout") for of in builders for builder in of]  # noqa: B009
    assert len(layouts) == 8
    assert all(layout is LAYOUT for layout in layouts)


def test_a_class_without_the_flag_does_not_ask() -> None:
    class Silent:
        cudagraph_support = "never"

        def __init__(self, layout: BlockTableLayout, device: torch.device) -> None:
            self.layout = layout

        def build(self, common: CommonAttentionMetadata) -> None: ...

    ((builder,),) = create_metadata_builders(LAYOUT, [refused(Silent)], "cpu")

    assert isinstance(builder, Silent)


def test_a_flag_without_the_keyword_is_refused_before_anything_is_built() -> None:
    built = []

    class First(Plain):
        def __init__(self, layout: BlockTableLayout, device: torch.device) -> None:
            built.append(self)

    class Forgetful(Plain):
        requires_block_table_width = True  # type: ignore[assignment]  # the fault under test

    with pytest.raises(InvalidSpecError, match="called as") as caught:
        create_metadata_builders(LAYOUT, [First, refused(Forgetful)], "cpu")

    assert "Forgetful" in str(caught.value)
    assert built == []


def test_a_keyword_without_the_flag_is_refused() -> None:
    class Shy(Asking):
        requires_block_table_width = False  # type: ignore[assignment]  # the fault under test

    with pytest.raises(InvalidSpecError, match="Shy has requires_block_table_width False"):
        create_metadata_builders(LAYOUT, [refused(Shy)], "cpu")


@pytest.mark.parametrize("flag", [1, None, "yes"])
def test_a_flag_that_is_no_bool_is_refused(flag: object) -> None:
    class Vague(Plain):
        pass

    setattr(Vague, "requires_block_table_width", flag)  # noqa: B010

    with pytest.raises(InvalidSpecError, match="must be True or False"):
        create_metadata_builders(LAYOUT, [Vague], "cpu")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (None, "has no method build"),
        (lambda self: None, "called as build"),
        (lambda self, common, fast: None, "called as build"),
        (lambda self, *, common: None, "called as build"),
    ],
    ids=["none", "takes-nothing", "takes-more", "takes-a-keyword"],
)
def test_a_builder_that_cannot_build_a_batch_is_refused_when_it_is_given(
    build: object, message: str
) -> None:
    """Not in the first step: before anything is built."""
    built = []

    class First(Plain):
        def __init__(self, layout: BlockTableLayout, device: torch.device) -> None:
            built.append(self)

    class Odd(Plain):
        pass

    setattr(Odd, "build", build)  # noqa: B010

    with pytest.raises(InvalidSpecError, match=f"Odd.*{message}"):
        create_metadata_builders(LAYOUT, [First, Odd], "cpu")

    assert built == []


def test_something_without_a_constructor_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="readable constructor"):
        create_metadata_builders(LAYOUT, [refused("builder")], "cpu")


def test_something_that_is_no_layout_is_refused() -> None:
    """Before a builder is called, whether or not it looks at its layout."""
    with pytest.raises(InvalidSpecError, match="must be a BlockTableLayout"):
        create_metadata_builders(None, [Plain], "cpu")  # type: ignore[call-overload]  # the fault under test


@pytest.mark.parametrize("num_ubatches", [0, -1, 1.5, True])
def test_a_count_of_micro_batches_is_positive(num_ubatches: int) -> None:
    with pytest.raises(InvalidSpecError, match="num_ubatches"):
        create_metadata_builders(LAYOUT, [Plain], "cpu", num_ubatches=num_ubatches)


def test_the_least_support_names_who_limits_it() -> None:
    support = least_cudagraph_support([Plain, Asking, DSAIndexerMetadataBuilder])

    assert support == CudagraphSupport("single", "Asking")
    same = least_cudagraph_support([Plain, MLAMetadataBuilder, DSAIndexerMetadataBuilder])
    assert same == ("uniform", "MLAMetadataBuilder")
    assert least_cudagraph_support([Plain]) == ("always", "Plain")
    assert least_cudagraph_support([]) == ("always", "")


def test_a_class_that_says_nothing_of_graphs_is_refused() -> None:
    class Quiet(Plain):
        cudagraph_support = "sometimes"  # type: ignore[assignment]  # the fault under test

    with pytest.raises(InvalidSpecError, match="cudagraph_support must be one of"):
        least_cudagraph_support([refused(Quiet)])
