"""``bt-runner run``: text from a checkpoint, as it is written."""
