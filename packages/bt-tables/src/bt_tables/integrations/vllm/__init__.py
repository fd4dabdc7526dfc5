"""Checks vLLM's block tables in every step: ``BT_SANITIZE=1 vllm serve ...``."""

from .plugin import register

__all__ = ["register"]
