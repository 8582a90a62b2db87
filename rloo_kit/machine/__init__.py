"""This machine: hardware, import order and variables, memory release.

``setup`` (environment) starts the libraries in order; ``release`` and ``session`` (cleanup) free
memory. The package must not know runs, prompts or rewards.
"""
