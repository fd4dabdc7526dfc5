"""The sanitizer's Triton kernel; imported only where a step lies on CUDA or a test asks."""
