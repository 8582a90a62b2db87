"""Tools that a model may call while it completes a prompt, and environments that have them.

A tool is a function with type hints and a docstring in Google's style, plain or async. An
environment is a class with ``reset(**row)``, whose other public methods are tools, and which may
have ``get_reward()``. Both have the meaning that TRL's ``GRPOTrainer`` gives them.
"""
