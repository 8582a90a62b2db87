"""This machine: hardware, cards by name, import order and variables, pickles, memory release.

``setup`` (environment) starts the libraries in order; ``release`` and ``session`` (memory) give
memory back. The package knows nothing of runs, prompts or rewards.
"""
