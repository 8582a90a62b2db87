"""Checks of rewards before a run, and training of reward models.

Public: ``rk.check_rewards`` (lab) and ``rk.train_reward_model`` (reward_model). The package samples
and scores; it never changes a policy.
"""
