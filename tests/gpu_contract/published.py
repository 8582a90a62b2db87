"""transformers' config of the models whose sizes the kit has in a table."""

from transformers import Qwen3Config

from rloo_kit.models.shape import read_shape


def published_config(name):
    """Return the config of a Qwen3 model that the run files of examples/ name."""
    shape = read_shape(name)
    config = Qwen3Config(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.others < 2 * shape.vocab_size * shape.hidden_size,
    )
    if shape.packed:
        config.quantization_config = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    return config
