"""This machine: hardware, cards by name, import order and variables, memory release.

Knows nothing of runs, prompts or rewards.
"""
