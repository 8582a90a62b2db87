"""Prompts: built-in tasks, files, hub datasets, reasoning-gym.

``rk.load_prompts`` (prompts) returns a dataset. The package knows nothing of rewards or training.
"""
