"""Diagnosis: read a run's record back, find what went wrong, watch a run, check the machine.

Public names: ``rk.diagnose`` (run_rules); ``read_run`` (record); ``RunWatch`` (watch); ``examine``
(installation). ``registry`` holds the kinds of findings; reward_lab uses it for rewards too.
The package reads files and rows. It must not import the trainer, the report or the live view.
"""
