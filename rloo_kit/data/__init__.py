"""Prompts: built-in tasks, files, hub datasets, reasoning-gym.

Returns plain datasets; knows nothing of rewards or the trainer.
"""
