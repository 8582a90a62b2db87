"""One run from start to end: its folder, its record, its subprocesses.

The package connects the packages above, and holds no maths. Public: ``train``, ``calibrate`` and
``warm_up``.
"""
