"""``bt-width plan``: block tables, caches and what fits into memory, for a person or as JSON."""
