"""A sanitizer for block tables: it finds the wrong id that would not crash."""

from .drawing import draw_row
from .findings import BlockTableFaultError, FaultKind, Finding, SanitizerReport
from .picture import PictureColumn, RowPicture
from .sanitizer import BlockTableSanitizer

__all__ = [
    "BlockTableFaultError",
    "BlockTableSanitizer",
    "FaultKind",
    "Finding",
    "PictureColumn",
    "RowPicture",
    "SanitizerReport",
    "draw_row",
]
