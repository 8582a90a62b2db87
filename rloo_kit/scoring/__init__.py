"""Reward functions: the contract, loading by name or file, composition, the catalogue.

Public: ``rk.load_rewards`` (specs), ``rk.gated``, ``rk.routed`` and ``rk.rescaled`` (composition).
The package calls rewards and checks scores; it knows nothing of the trainer.
"""
