"""A minimal decode loop over block tables that checks itself against a dense reference."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bt_runner.drafters import Drafter, NGramDrafter
    from bt_runner.engine import Engine
    from bt_runner.errors import BadInputError, PoolExhaustedError, RequestRefusedError, RunnerError
    from bt_runner.models.caches import CacheOptions
    from bt_runner.models.config import ModelConfig, hybrid_config
    from bt_runner.models.weights import Weights, random_weights
    from bt_runner.requests import FinishReason, Request, SamplingParams
    from bt_runner.scheduler import StepOutput, StepOutputs

__version__ = "0.1.0"

# loaded by their first use, so that --version and --help do not wait for torch
_MODULES = {
    "BadInputError": "errors",
    "CacheOptions": "models.caches",
    "Drafter": "drafters",
    "Engine": "engine",
    "FinishReason": "requests",
    "ModelConfig": "models.config",
    "NGramDrafter": "drafters",
    "PoolExhaustedError": "errors",
    "Request": "requests",
    "RequestRefusedError": "errors",
    "RunnerError": "errors",
    "SamplingParams": "requests",
    "StepOutput": "scheduler",
    "StepOutputs": "scheduler",
    "Weights": "models.weights",
    "hybrid_config": "models.config",
    "random_weights": "models.weights",
}

__all__ = [
    "BadInputError",
    "CacheOptions",
    "Drafter",
    "Engine",
    "FinishReason",
    "ModelConfig",
    "NGramDrafter",
    "PoolExhaustedError",
    "Request",
    "RequestRefusedError",
    "RunnerError",
    "SamplingParams",
    "StepOutput",
    "StepOutputs",
    "Weights",
    "__version__",
    "hybrid_config",
    "random_weights",
]


if not TYPE_CHECKING:
    # hidden from type checkers, which would take any name for a public one

    def __getattr__(name: str) -> object:
        """Load the module of a public name."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted({*globals(), *__all__})
