"""Tools that a model can call while it completes a prompt, and environments that provide tools.

A tool is a plain or async function with type hints and a docstring in Google style. An environment
is a class with a method ``reset(**row)`` and optionally ``get_reward()``. Its other public methods
are tools. Tools and environments work as in TRL's ``GRPOTrainer``.
"""
