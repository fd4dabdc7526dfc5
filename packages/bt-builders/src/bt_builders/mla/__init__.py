"""Metadata of multi-head latent attention."""
