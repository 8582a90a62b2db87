"""The memory plan of a run: will it fit on a card, and what to change.

Public: ``rk.plan`` and ``Plan`` (planner). ``memory`` holds the one table of bytes, ``facts`` reads
a run file, ``advice`` searches for changes. Reads configs, never weights; must not load a model,
and does not know how a run is trained.
"""
