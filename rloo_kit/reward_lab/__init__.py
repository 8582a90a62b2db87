"""Try rewards before a run and train reward models.

Samples and scores; never changes a policy.
"""
