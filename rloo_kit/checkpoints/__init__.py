"""Checkpoints: an atomic store, exact resume, and external stop conditions.

Public: ``store.write_checkpoint``, ``find_checkpoint`` and ``Checkpoint``;
``resume.ResumableTrainer``, the base of the kit's trainer; ``weights.write_weights``;
``state.write_tree``; ``stopping.stop_signals``.
The package must not know the kit's trainer, only the one of transformers.
"""
