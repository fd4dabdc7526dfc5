"""A planned step on the device: its inputs, its graph, its tokens."""
