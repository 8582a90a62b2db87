"""Facts of a small run on a GPU, for which the tests plan memory."""

USUAL = {
    "in_4bit": True, "value_bytes": 2, "rank": 16, "whole": 0,
    "optimizer": "adamw_torch", "checkpointing": "unsloth", "rows": 8, "at_once": 8,
    "step_rows": 8, "group": 4, "prompt": 512, "completion": 512, "max_length": 1024,
    "budget": None, "scores": True, "keeps_graphs": True, "engine": "transformers",
    "sleeps": True, "share": None, "batched_tokens": 4096, "draft_tokens": 0,
}  # fmt: skip
