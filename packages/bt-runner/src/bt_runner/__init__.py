"""A minimal decode loop over block tables that checks itself against a dense reference."""

__version__ = "0.1.0"
