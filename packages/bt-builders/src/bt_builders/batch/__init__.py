"""One step's batch as every builder sees it: its tensors, their checks and how it is cut."""
