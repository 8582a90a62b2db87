"""Run a training from start to end, and manage its folder, its record and its subprocesses.

The package connects the other packages of the kit, and has no maths of its own. Its public
functions are ``train``, ``calibrate`` and ``warm_up``.
"""
