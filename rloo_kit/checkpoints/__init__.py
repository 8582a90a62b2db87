"""Checkpoints: write them atomically, resume from them exactly, and stop a training on a signal.

``resume.ResumableTrainer`` is the base class of the kit's trainer. It uses the modules ``store``
(folders of checkpoints), ``weights`` and ``state`` (their files), and ``stopping`` (signals). This
package must not import the kit's trainer, only the trainer of transformers.
"""
