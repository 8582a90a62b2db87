"""Engines that sample completions: vLLM in this process, a vLLM server, transformers; the canary.

Takes prompts, returns token ids and log-probs; knows nothing of rewards.
"""
