"""Checkpoints: write them atomically, resume from them exactly, and stop a training on a signal.

Other packages use ``store.write_checkpoint``, ``store.find_checkpoint`` and ``store.Checkpoint``;
``resume.ResumableTrainer``, the base class of the kit's trainer; ``weights.write_weights``;
``state.write_tree``; and ``stopping.stop_signals``.
This package must not import the kit's trainer, only the one of transformers.
"""
