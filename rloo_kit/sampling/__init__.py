"""Engines that sample completions, and the canary that checks them.

``start_engine`` starts vLLM in this process or connects to a vLLM server, and returns an
``Engine``, or None if transformers samples. An engine receives prompt ids and returns token ids
with log-probabilities. ``Canary`` checks that an engine samples from the current policy.
``Completer`` samples completions of rows and calls the rewards, for training and evaluation. The
package must not depend on the training loop.
"""
