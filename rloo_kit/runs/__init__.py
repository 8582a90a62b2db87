"""One run from start to end: its folder, its record, its subprocesses.

Ties the packages above together; holds no maths.
"""
