"""Checkpoints: an atomic store, exact resume, and external stop conditions.

Public: ``store.write_checkpoint``, ``find_checkpoint`` and ``Checkpoint``;
``resume.ResumableTrainer``, which the kit's trainer is; ``weights.write_weights``;
``state.write_tree``;
``stopping.stop_signals``.
It must not know the kit's trainer, only transformers'.
"""
