"""Reward functions: the contract, loading by name or file, composition, the catalogue.

Calls rewards and checks scores; knows nothing of the trainer.
"""
