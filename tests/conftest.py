"""What holds for every test: Triton interpreted unless told otherwise; CUDA, long forms apart."""

import os

# Read when a library is first imported: Triton interprets kernels, and tensors of tests are so
# small that a second thread only waits. Processes that tests start have both, too.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect long forms unless ``-m`` names them; skip CUDA tests where they cannot run."""
    if "long" not in (config.option.markexpr or ""):
        long_forms = [item for item in items if item.get_closest_marker("long")]
        if long_forms:
            config.hook.pytest_deselected(items=long_forms)
            items[:] = [item for item in items if not item.get_closest_marker("long")]
    cuda_items = [item for item in items if item.get_closest_marker("cuda")]
    if cuda_items:
        reason = _why_no_cuda()
        if reason:
            for item in cuda_items:
                item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str | None:
    if os.environ["TRITON_INTERPRET"] == "1":
        return "kernels are interpreted; `hatch run gpu` sets TRITON_INTERPRET=0"
    import torch

    return None if torch.cuda.is_available() else "no CUDA device"
