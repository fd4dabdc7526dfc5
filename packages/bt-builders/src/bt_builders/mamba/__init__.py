"""Metadata of recurrent (Mamba) layers."""
