"""The RLOO step on tensors: from scores and log-probabilities to gradients and metrics.

Public: ``advantages`` (leave-one-out), ``objective`` (KL, clipping), ``rollout`` (a batch as data),
``batching`` (micro-batches), ``learner`` (the passes), ``metrics``, ``guards`` (NaN, memory).
It must not know TRL, files, models' loading or the trainer.
"""
