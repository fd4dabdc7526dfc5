"""The demo: real text through the built-in hybrid, and the check of every token."""
