"""This machine: hardware, import order and variables, memory release.

``setup`` (environment) starts the libraries in order; ``release`` and ``session`` (cleanup) give
memory back. The package knows nothing of runs, prompts or rewards.
"""
