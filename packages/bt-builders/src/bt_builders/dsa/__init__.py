"""Metadata of the DSA lightning indexer."""
