"""Memory plan of a run on a card, and changes that make it fit.

Public: ``rk.plan`` and ``Plan`` (planner). ``memory`` computes the bytes, ``facts`` reads a run
file, ``advice`` searches for changes. The package reads configs, never weights. It must not load a
model or import the trainer.
"""
