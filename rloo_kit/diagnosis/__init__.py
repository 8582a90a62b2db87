"""Diagnosis: read a run's record back, find what went wrong, watch a run, check the machine.

Public names: ``rk.diagnose`` (run_rules); ``read_run`` (record); ``RunWatch`` (watch); ``examine``
(installation). ``registry`` defines findings and their kinds, also for the package reward_lab.
The package reads files and rows. It must not import the trainer, the report or the live view.
"""
