"""Two processes can prove that they planned the same."""

import os
import subprocess
import sys

import pytest
from tests.support.distinct_layouts import LIMITS, ONE_FIELD_APART
from tests.support.kinds import EVERY_KIND
from tests.support.plans import plan, plan_ranks

from bt_width import (
    AttentionSpec,
    BlockTableLayout,
    CacheSpec,
    UniformSpec,
)

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("spec", EVERY_KIND)
def test_all_ranks_of_a_plan_have_one_digest(spec: CacheSpec) -> None:
    layouts = plan_ranks(spec, 1000, 4, interleave=4)

    assert len({layout.digest() for layout in layouts}) == 1


@pytest.mark.parametrize("layout", ONE_FIELD_APART)
def test_plans_that_differ_in_anything_else_have_two(layout: BlockTableLayout) -> None:
    same = BlockTableLayout.plan(AttentionSpec(block_size=64), LIMITS, 16)

    assert layout != same
    assert layout.digest() != same.digest()


def test_all_those_digests_differ() -> None:
    layouts = [parameter.values[0] for parameter in ONE_FIELD_APART]

    assert len({layout.digest() for layout in layouts}) == len(layouts)


def test_a_digest_survives_the_text() -> None:
    layout = plan(AttentionSpec(block_size=64), 1000)

    assert BlockTableLayout.from_json(layout.to_json()).digest() == layout.digest()


def test_another_process_has_the_same_digest() -> None:
    """Whatever the seed of its hashes."""
    layout = BlockTableLayout.plan(
        UniformSpec(members={name: AttentionSpec(block_size=64) for name in "cab"}), LIMITS, 16
    )
    program = (
        "import sys; from bt_width import BlockTableLayout; "
        "print(BlockTableLayout.from_json(sys.argv[1]).digest())"
    )

    digests = {
        subprocess.run(
            [sys.executable, "-c", program, layout.to_json()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert digests == {layout.digest()}
