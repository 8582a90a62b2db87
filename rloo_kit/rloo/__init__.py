"""The RLOO step on tensors: advantages, objective, batching, rollout, learner, numeric guards.

No TRL, no files, no model loading.
"""
