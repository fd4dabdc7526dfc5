"""The checks of one step, each a plain vectorised function over one group's tensors."""
