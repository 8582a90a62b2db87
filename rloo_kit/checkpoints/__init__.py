"""Checkpoints: an atomic store, exact resume, and external stop conditions.

Public: ``store.write_checkpoint``, ``find_checkpoint`` and ``Checkpoint``; ``resume.ExactResume``,
which a trainer holds as a field; ``stopping.StopSignals`` and ``TimeLimit``.
It must not know the trainer's class, only what ``resume.ExactResume`` names.
"""
