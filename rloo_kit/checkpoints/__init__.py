"""Checkpoints: atomic store, exact resume, stop conditions.

Knows the trainer only through its hooks.
"""
