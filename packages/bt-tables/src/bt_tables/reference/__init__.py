"""The reference implementation of every kernel, file by file: what tests compare with, and the CPU.

A reference reads everything a launch reads before it writes anything, as if all programs
ran at once, and says what it would read and write, so that a test can prove that no
program of a launch waits for another.
"""
