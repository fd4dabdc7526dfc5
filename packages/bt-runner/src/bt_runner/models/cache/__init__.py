"""The memory behind the tables: which caches there are, and how a slot is read and written."""
