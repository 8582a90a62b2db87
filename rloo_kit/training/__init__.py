"""The leave-one-out trainer (a subclass of TRL's ``RLOOTrainer``), its settings and its dry run.

Public names: ``LeaveOneOutTrainer`` and ``LeaveOneOutConfig``. The module ``step_trainer`` builds
the parts of ``rloo.step.Step`` from TRL's trainer. These parts are in ``policy`` (forward passes),
``sampler`` (sampling and rewards), ``dynamic_sampling`` and ``step_log``. The package must not
depend on run folders, reports or the command line.
"""
