"""A sanitizer for block tables: it finds the wrong id that would not crash."""

from .findings import BlockTableFaultError, FaultKind, Finding, SanitizerReport
from .picture import RowPicture, draw_row
from .sanitizer import BlockTableSanitizer

__all__ = [
    "BlockTableFaultError",
    "BlockTableSanitizer",
    "FaultKind",
    "Finding",
    "RowPicture",
    "SanitizerReport",
    "draw_row",
]
