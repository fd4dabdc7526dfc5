"""Block tables on the device: staged edits, one copy and one launch a step, with Triton and a PyTorch twin."""

__version__ = "0.1.0"
