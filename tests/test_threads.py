"""Every public class that keeps something says which thread may use it; an engine each works."""

import enum
import importlib
import inspect
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.bt_runner.harness import decode, decode_all_densely, greedy_traffic, tiny_engine
from tests.support.source_trees import PACKAGES

MESSAGES = (Exception, enum.Enum, tuple)
"""What is handed over whole and never changes."""


def classes_that_keep_something() -> Iterator[type]:
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            found = getattr(module, name)
            if not inspect.isclass(found) or issubclass(found, MESSAGES):
                continue
            is_frozen = getattr(getattr(found, "__dataclass_params__", None), "frozen", False)
            is_protocol = getattr(found, "_is_protocol", False)
            if not is_frozen and not is_protocol:
                yield found


@pytest.mark.parametrize(
    "kept", list(classes_that_keep_something()), ids=lambda found: found.__name__
)
def test_a_class_says_which_thread_may_use_it(kept: type) -> None:
    assert "thread" in (kept.__doc__ or "")


def test_engines_in_several_threads_do_not_disturb_each_other() -> None:
    """One engine a thread, as its class says: the tokens are those of the dense reference."""
    traffics = [greedy_traffic(seed, (30, 7, 12, 21), max_new_tokens=8) for seed in (1, 2, 3)]

    with ThreadPoolExecutor(len(traffics)) as threads:
        found = list(threads.map(lambda traffic: decode(tiny_engine(), traffic), traffics))

    assert found == [decode_all_densely(traffic) for traffic in traffics]
