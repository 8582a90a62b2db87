"""The RLOO step on tensors: from scores and log-probabilities to gradients and metrics.

Public: ``step`` (the algorithm, in order), ``rollout`` (a batch as data), ``advantages``,
``objective`` (KL, losses), ``learner`` (the passes), ``batching``, ``metrics``, ``guards``.
The package must not know TRL, files, the loading of models or the trainer.
"""
