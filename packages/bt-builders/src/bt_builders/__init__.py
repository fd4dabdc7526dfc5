"""Attention metadata for the DSA indexer, MLA and Mamba, cut to the block table's planned width."""

__version__ = "0.1.0"
