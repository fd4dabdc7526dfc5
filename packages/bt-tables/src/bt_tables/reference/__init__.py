"""The kernels' plain twins, file by file: the truth for their tests, and what runs on the CPU.

A twin reads everything a launch reads before it writes anything, as if all programs ran
at once, and says what it would read and write, so that a test can prove that no program
of a launch waits for another.
"""
