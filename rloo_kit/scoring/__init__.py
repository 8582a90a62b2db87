"""Load, call, check, combine and list reward functions.

Public: ``rk.load_rewards`` (in ``specs``), ``rk.gated``, ``rk.routed`` and ``rk.rescaled`` (in
``composition``). ``contract`` checks calls and scores, and ``catalogue`` lists the built-in
rewards. The package does not import the trainer.
"""
