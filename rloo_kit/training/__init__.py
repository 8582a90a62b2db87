"""The leave-one-out trainer over TRL, its preparation and its dry run.

Hooks that call rloo, sampling and scoring.
"""
