"""The RLOO training step on tensors: from scores and log-probabilities to gradients and metrics.

Public modules: ``step`` (the algorithm, in order), ``rollout`` (the data of a generation batch),
``advantages``, ``objective`` (KL and losses), ``learner`` (forward and backward passes),
``batching``, ``metrics``, ``guards``. This package must not depend on TRL's trainer or on the kit's
trainer, and must not read files or load models.
"""
