"""Models: loading in 4 bit, LoRA adapters, GGUF files, shapes from a config, engine memory.

``load_model``, ``attach_lora`` and ``save_adapter`` are public; their module ``loading`` is the
only one that constructs a model. ``notes_of(model)`` returns the kit's notes on one. The package
knows nothing of prompts, rewards or training.
"""
