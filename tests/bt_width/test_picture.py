"""The picture of a plan: what is drawn where, to scale."""

import itertools
from collections import Counter
from xml.etree import ElementTree

import pytest

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    ContextParallel,
    MambaSpec,
    RingSpec,
    ServingLimits,
    SlidingWindowSpec,
)
from bt_width.picture import draw_rows

pytestmark = pytest.mark.fast

SVG = "{http://www.w3.org/2000/svg}"


def planned(
    spec: CacheSpec,
    length: int,
    *,
    kernel: int | None = None,
    lookahead: int = 0,
    ranks: int = 1,
    interleave: int = 1,
) -> BlockTableLayout:
    limits = ServingLimits(
        max_model_len=length,
        max_num_reqs=1,
        max_num_batched_tokens=8,
        lookahead_tokens=lookahead,
        context_parallel=ContextParallel(size=ranks, interleave=interleave),
    )
    return BlockTableLayout.plan(spec, limits, kernel)


def lanes(layout: BlockTableLayout) -> list[list[ElementTree.Element]]:
    """The cells of each lane of a picture of one group, from the top down."""
    root = ElementTree.fromstring(draw_rows([("group", layout)]))
    found: dict[str, list[ElementTree.Element]] = {}
    for cell in root.iter(f"{SVG}rect"):
        if cell.find(f"{SVG}title") is not None:
            found.setdefault(cell.attrib["y"], []).append(cell)
    return list(found.values())


def looks(lane: list[ElementTree.Element]) -> Counter[str]:
    return Counter(cell.attrib["class"] for cell in lane)


def end_of(lane: list[ElementTree.Element]) -> float:
    return float(lane[-1].attrib["x"]) + float(lane[-1].attrib["width"])


def test_blocks_are_split_and_alignment_is_hatched() -> None:
    """5 blocks of 16, rounded up to 8 by 64-token spans, in kernel blocks of 8."""
    spec = AttentionSpec(block_size=16, token_alignment=64)

    tokens, blocks, columns, slots = lanes(planned(spec, 72, kernel=8, lookahead=3))

    assert looks(tokens) == {"r0": 72, "look": 3}
    assert looks(blocks) == {"r0": 5, "pad": 3}
    assert looks(columns) == {"r0": 10, "pad": 6}
    assert looks(slots) == {"r0": 75}
    assert end_of(blocks) == pytest.approx(end_of(columns))
    assert end_of(tokens) == pytest.approx(end_of(slots))


def test_what_a_window_no_longer_reads_is_grey() -> None:
    """72 tokens and a window of 24: 49 are not read, which is 6 whole blocks of 8."""
    spec = SlidingWindowSpec(block_size=8, window=24, token_alignment=None)

    tokens, blocks, _, slots = lanes(planned(spec, 72))

    assert looks(tokens) == {"null": 49, "r0": 23}
    assert looks(blocks) == {"null": 6, "r0": 3}
    assert looks(slots) == {"gone": 48, "r0": 24}


def test_each_rank_has_a_colour_and_its_runs() -> None:
    """Runs of 4 in turn; 100 tokens are 52 and 48."""
    spec = AttentionSpec(block_size=16, token_alignment=None)

    tokens, first, second, _, slots = lanes(planned(spec, 100, ranks=2, interleave=4))

    assert looks(tokens) == {"r0": 52, "r1": 48}
    assert [cell.attrib["class"] for cell in tokens[:9]] == ["r0"] * 4 + ["r1"] * 4 + ["r0"]
    assert (set(looks(first)), set(looks(second))) == ({"r0"}, {"r1"})
    assert looks(slots) == {"r0": 52}


def test_states_are_the_old_the_current_and_the_drafts() -> None:
    spec = MambaSpec(block_size=32, mode="align", num_speculative_blocks=1)

    _, states = lanes(planned(spec, 72))

    assert [cell.attrib["class"] for cell in states] == ["null", "null", "r0", "look"]


def test_a_ring_is_one_block() -> None:
    _, block, slots = lanes(planned(RingSpec(block_size=4), 72))

    assert (len(block), len(slots)) == (1, 4)


def test_cells_too_small_to_be_seen_are_drawn_as_one() -> None:
    """A million tokens in a small file, with the parts still to scale."""
    spec = SlidingWindowSpec(block_size=16, window=2**18)

    layout = planned(spec, 2**20)
    tokens, *_ = lanes(layout)

    assert looks(tokens) == {"null": 1, "r0": 1}
    widths = [float(cell.attrib["width"]) for cell in tokens]
    assert widths[0] == pytest.approx(3 * widths[1], rel=1e-3)
    assert len(draw_rows([("group", layout)])) < 10_000


def numbers(layout: BlockTableLayout) -> list[str]:
    """The texts in cells."""
    root = ElementTree.fromstring(draw_rows([("group", layout)]))
    return [text.text or "" for text in root.iter(f"{SVG}text") if "class" not in text.attrib]


def test_a_lane_numbers_all_of_its_cells_or_none() -> None:
    """No 0 to 9 in slots that have room for one digit and not for two."""
    spec = AttentionSpec(block_size=16, token_alignment=None)

    assert numbers(planned(spec, 100)) == 2 * [str(block) for block in range(7)]
    assert numbers(planned(spec, 10)) == [*map(str, range(10)), "0", "0", *map(str, range(10))]


def legend(layout: BlockTableLayout) -> list[str]:
    root = ElementTree.fromstring(draw_rows([("group", layout)]))
    lowest = max(float(cell.attrib["y"]) for cell in root.iter(f"{SVG}rect") if "y" in cell.attrib)
    return [text.text or "" for text in root.iter(f"{SVG}text") if float(text.attrib["y"]) > lowest]


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        pytest.param(planned(RingSpec(block_size=4), 72), ["in use"], id="ring"),
        pytest.param(
            planned(AttentionSpec(block_size=16, token_alignment=None), 100, ranks=2),
            ["in use, a colour for each rank"],
            id="ranks",
        ),
        pytest.param(
            planned(SlidingWindowSpec(block_size=8, window=24, token_alignment=None), 72),
            ["in use", "null, no longer read", "no slot"],
            id="window",
        ),
    ],
)
def test_the_legend_explains_what_is_drawn_alone(
    layout: BlockTableLayout, words: list[str]
) -> None:
    assert legend(layout) == words


def test_a_name_cannot_become_markup() -> None:
    text = draw_rows([("<script>&'\"", planned(RingSpec(block_size=4), 9))])

    assert "<script>" not in text
    assert ElementTree.fromstring(text) is not None


def test_one_of_a_thing_is_no_plural() -> None:
    assert "1 block of 4: 1 column<" in draw_rows([("r", planned(RingSpec(block_size=4), 9))])


ATTENTION = AttentionSpec(block_size=16, token_alignment=None)


def texts(layout: BlockTableLayout, anchor: str) -> list[str]:
    root = ElementTree.fromstring(draw_rows([("group", layout)]))
    return [
        text.text or "" for text in root.iter(f"{SVG}text") if text.get("text-anchor") == anchor
    ]


def test_lanes_and_heading_name_ranks_and_kernel_blocks_where_there_are_several() -> None:
    whole = planned(ATTENTION, 100)
    cut = planned(ATTENTION, 100, kernel=8, ranks=2, interleave=4)

    assert texts(whole, "end") == ["tokens", "blocks", "kernel blocks", "slots"]
    assert texts(whole, "start") == ["group", "100 tokens, 7 blocks of 16: 7 columns"]
    assert texts(cut, "end") == [
        *("tokens", "blocks, rank 0", "blocks, rank 1", "kernel blocks, rank 0", "slots, rank 0")
    ]
    about = "100 tokens, 4 blocks of 16 on each of 2 ranks, each 2 kernel blocks: 8 columns"
    assert texts(cut, "start") == ["group", about]


@pytest.mark.parametrize(
    ("spec", "spans"),
    [
        pytest.param(RingSpec(block_size=4), [72, 4, 4], id="ring"),
        pytest.param(MambaSpec(block_size=32, mode="align"), [72, 96], id="mamba"),
        pytest.param(ATTENTION, [72, 80, 80, 72], id="attention"),
    ],
)
def test_every_lane_has_the_scale_of_the_tokens(spec: CacheSpec, spans: list[int]) -> None:
    found = lanes(planned(spec, 72))

    left = float(found[0][0].attrib["x"])
    token = (end_of(found[0]) - left) / 72
    assert {float(lane[0].attrib["x"]) for lane in found} == {left}
    assert [(end_of(lane) - left) / token for lane in found] == pytest.approx(spans, abs=0.01)


def test_runs_too_small_to_be_seen_are_drawn_from_the_first_token_on() -> None:
    tokens, blocks, *_ = lanes(planned(ATTENTION, 2**16, ranks=2))

    assert looks(tokens) == {"r0": 1}
    assert tokens[0].attrib["x"] == blocks[0].attrib["x"]


def test_nothing_is_drawn_over_another_lane_or_past_the_picture() -> None:
    window = SlidingWindowSpec(block_size=8, window=24, token_alignment=None)
    aligned = AttentionSpec(block_size=16, token_alignment=64)
    groups = [("first", planned(aligned, 72, lookahead=3)), ("second", planned(window, 72))]

    root = ElementTree.fromstring(draw_rows(groups))

    cells = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    tops = sorted({float(cell.attrib["y"]) for cell in cells})
    height = float(cells[0].attrib["height"])
    assert len(tops) == 8
    assert all(below - above > height for above, below in itertools.pairwise(tops))
    # each text has the whole of its 12 pixels between lanes, or in the middle of one
    heads = [t for t in root.iter(f"{SVG}text") if t.get("text-anchor") == "start"]
    for head in heads:
        bottom = float(head.attrib["y"])
        assert not any(top < bottom and bottom - 12 < top + height for top in tops)
    keys = [t for t in root.iter(f"{SVG}text") if t.get("text-anchor") is None]
    places = [(float(key.attrib["y"]), float(key.attrib["x"]), len(key.text or "")) for key in keys]
    assert len({y for y, _, _ in places}) == 2
    for (y, x, length), (next_y, next_x, _) in itertools.pairwise(places):
        assert (next_y, next_x) > (y + 12, 0.0) or next_x - 18 > x + 6 * length
    right, bottom = map(float, root.attrib["viewBox"].split()[2:])
    assert all(x + 6 * length <= right for _, x, length in places)
    assert all(float(cell.attrib["x"]) + float(cell.attrib["width"]) <= right for cell in cells)
    assert tops[-1] + height < places[0][0] - 10 < places[-1][0] < bottom
