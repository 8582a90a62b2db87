"""Models: loading in 4 bit, LoRA adapters, GGUF files, shapes from a config, engine memory.

``load_model``, ``attach_lora`` and ``save_adapter`` (loading) are public; it is the only module
that constructs a model. ``notes_of(model)`` (notes) is what the kit remembers of one. The
package knows nothing of prompts, rewards or training.
"""
