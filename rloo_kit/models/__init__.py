"""Models: loading in 4 bit, LoRA adapters, GGUF files, shapes from a config, engine memory.

The only package that constructs a model.
"""
