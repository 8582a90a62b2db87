"""Engines that sample completions, and the canary that checks them.

``start_engine`` (choice) starts vLLM in this process, a client of a vLLM server, or none where
transformers samples; each is an ``Engine`` that takes prompt ids and returns token ids with
log-probabilities. ``Canary`` proves that they come from the policy that trains. The package knows
nothing of rewards, datasets or the training loop.
"""
