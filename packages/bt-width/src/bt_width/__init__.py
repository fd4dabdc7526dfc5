"""The pure contract of paged KV-cache block tables: how many blocks, how wide a row, where a token lies."""

__version__ = "0.1.0"
