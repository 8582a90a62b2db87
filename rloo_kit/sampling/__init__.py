"""Engines that sample completions, and the canary that checks them.

``start_engine`` (choice) starts vLLM in this process, an ``Engine`` that takes prompt ids and
returns token ids with log-probabilities, or none where transformers samples. ``Canary`` proves that
they come from the policy that trains. The package knows nothing of rewards, datasets or the
training loop.
"""
