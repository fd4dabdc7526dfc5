"""Block tables on the device: staged edits, one copy and one launch a step."""

from .staged import StagedBlockTables
from .step import StepBatch, StepTables

__version__ = "0.1.0"

__all__ = ["StagedBlockTables", "StepBatch", "StepTables"]
