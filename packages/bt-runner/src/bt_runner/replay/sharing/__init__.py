"""Blocks that requests with equal beginnings share."""
