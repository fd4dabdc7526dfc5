"""Triton kernels, one idea a file; importing one imports Triton."""
