"""Texts that grow at once are shown one after another, and nothing of them is lost."""

from __future__ import annotations

import random

import pytest

from bt_runner.run.command import InOrder


def test_first_text_is_shown_as_it_grows() -> None:
    """What belongs to the first text is written at once, the rest is kept back."""
    shown: list[str] = []
    printer = InOrder(["> a\n", "> b\n"], shown.append)

    printer.push(1, "late")
    printer.push(0, "now")

    assert shown == ["> a\n", "now"]


def test_next_text_is_shown_when_one_ends() -> None:
    """All that a text has grown to meanwhile follows its head."""
    shown: list[str] = []
    printer = InOrder(["> a\n", "> b\n"], shown.append)
    printer.push(1, "one ")

    printer.finish(0)
    printer.push(1, "two")

    assert shown == ["> a\n", "\n", "> b\none ", "two"]


@pytest.mark.parametrize("seed", range(20))
def test_order_of_arrival_does_not_matter(seed: int) -> None:
    """Whatever comes when, the whole is the texts in their order."""
    draw = random.Random(seed)
    texts = ["first", "second", "", "fourth"]
    pieces = {index: list(text) for index, text in enumerate(texts)}
    shown: list[str] = []
    printer = InOrder([f"> {index}\n" for index in pieces], shown.append)

    while pieces:
        index = draw.choice(list(pieces))
        if pieces[index]:
            printer.push(index, pieces[index].pop(0))
        else:
            del pieces[index]
            printer.finish(index)

    assert "".join(shown) == "> 0\nfirst\n> 1\nsecond\n> 2\n\n> 3\nfourth\n"
