"""The leave-one-out trainer over TRL, its settings, its preparation and its dry run.

Public: ``LeaveOneOutTrainer`` (hooks only), ``LeaveOneOutConfig``. The parts of a step are
``rollouts`` (sampling and rewards), ``steps`` (learning) and ``metrics`` (what is logged).
It must not know run folders, reports or the command line.
"""
