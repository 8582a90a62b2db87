"""The leave-one-out trainer over TRL, its settings and its dry run.

Public: ``LeaveOneOutTrainer``, ``LeaveOneOutConfig``. ``step_trainer`` makes the parts of
``rloo.step.Step`` of TRL's trainer: ``policy`` (passes), ``completer`` (sampling and rewards),
``options`` and ``metrics`` (the log). It must not know run folders, reports or the command line.
"""
