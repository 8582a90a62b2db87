"""Engines that sample completions, and the canary that checks them.

``start_engine`` (choice) starts vLLM in this process or connects to its server, an ``Engine`` that
takes prompt ids and returns token ids with log-probabilities, or none where transformers samples.
``Canary`` proves that they come from the policy that trains. ``Completer`` samples rows and calls
the rewards, for training and evaluation. The package must not know the training loop.
"""
