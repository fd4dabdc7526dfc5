"""Block tables on the device: staged edits, one copy and one launch a step."""

__version__ = "0.1.0"
