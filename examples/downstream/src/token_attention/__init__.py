"""An attention backend of one's own: it reads the cache token by token."""

from .attention import BACKEND, attend
from .builder import TokenTable, TokenTableBuilder

__all__ = ["BACKEND", "TokenTable", "TokenTableBuilder", "attend"]
