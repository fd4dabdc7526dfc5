"""Requests as real traffic brought them: what came, and when."""
