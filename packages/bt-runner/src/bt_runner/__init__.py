"""A minimal decode loop over block tables that checks itself against a dense reference."""

from bt_runner.decode_loop import StepOutput
from bt_runner.drafters import Drafter, NGramDrafter
from bt_runner.engine import Engine
from bt_runner.errors import BadInputError, PoolExhaustedError, RequestRefusedError, RunnerError
from bt_runner.models.cache.cache_groups import CacheOptions
from bt_runner.models.config import ModelConfig
from bt_runner.models.hybrid import hybrid_config
from bt_runner.models.weights import Weights, random_weights
from bt_runner.scheduling.request import FinishReason, Request, SamplingParams

__version__ = "0.1.0"

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
    "Weights",
    "__version__",
    "hybrid_config",
    "random_weights",
]
