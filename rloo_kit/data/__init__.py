"""Prompts from built-in tasks, files, hub datasets and reasoning-gym.

``rk.load_prompts`` (in ``prompts``) returns them as a dataset. The package does not import the
packages for rewards or training.
"""
