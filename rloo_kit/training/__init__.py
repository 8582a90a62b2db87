"""The leave-one-out trainer over TRL, its settings and its dry run.

Public: ``LeaveOneOutTrainer``, ``LeaveOneOutConfig``. ``step_trainer`` makes the parts of
``rloo.step.Step`` from TRL's trainer: ``policy`` (passes), ``sampler`` (sampling and rewards),
``dynamic_sampling`` and ``step_log``. The package must not know run folders, reports or the
command line.
"""
