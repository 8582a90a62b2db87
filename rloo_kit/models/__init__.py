"""Models: loading in 4 bit, LoRA adapters, GGUF files, shapes from a config, engine memory.

The public functions are ``load_model``, ``attach_lora`` and ``save_adapter``. Their module
``loading`` is the only one that creates models. ``notes_of(model)`` returns the facts that the kit
stores about a model. The package must not depend on prompts, rewards or training.
"""
