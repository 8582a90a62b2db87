"""Functions that make folders of Qwen3 models with random weights.

Nothing is downloaded. 4-bit weights are quantised one matrix at a time and written in the format of
bitsandbytes, so that 8 billion parameters never exist in 16 bit. Such a folder loads like a
pre-quantised model of the hub.
"""

import json
import os
import shutil
from pathlib import Path

PUBLISHED = {
    # hidden size, intermediate size, layers, heads, key-value heads, whether embeddings are tied;
    # from the config.json of Qwen/Qwen3-0.6B, -1.7B, -4B, -8B and -14B. Heads have 128 dimensions
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (5120, 17408, 40, 40, 8, False),
}
SMALL = {
    # Replaces all of the above when the suite itself is tried on a CPU
    "toy": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # 12 million parameters in the proportions of Qwen3-4B: the head is a tenth of the weights
    "12m": {
        "vocab_size": 3072, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
# Standard deviation of the weights: Qwen3's `initializer_range`
SPREAD = 0.02


def geometry_of(name: str) -> dict[str, object]:
    """Return the config values of a model of ``PUBLISHED`` or ``SMALL``."""
    if name in SMALL:
        return dict(SMALL[name])
    hidden, inner, layers, heads, kv_heads, tied = PUBLISHED[name]
    return {
        "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 128, "tie_word_embeddings": tied,
    }  # fmt: skip


def model_folder(root: Path, name: str, *, load_in_4bit: bool, device: str) -> Path:
    """Make the folder of a model, unless it exists, and return its path.

    Args:
        root: Folder that contains a folder for each model.
        name: Key of ``PUBLISHED`` or ``SMALL``.
        load_in_4bit: Make NF4 weights with double quantisation. False: bfloat16.
        device: Device on which the weights are drawn and quantised.
    """
    folder = root / f"{name}-{'bnb-4bit' if load_in_4bit else 'bf16'}"
    if (folder / "config.json").exists():
        return folder
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    _write_weights(partial, name, load_in_4bit, device)
    _write_config(partial, name, load_in_4bit)
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)
    return folder


def _meta_model(name: str):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**geometry_of(name), max_position_embeddings=40960)
    with torch.device("meta"):
        return Qwen3ForCausalLM(config)


def _write_weights(folder: Path, name: str, load_in_4bit: bool, device: str) -> None:
    import torch
    from safetensors.torch import save_file

    model = _meta_model(name)
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for path, parameter in model.named_parameters():  # a tied head is listed only once
        shape = parameter.shape
        if parameter.ndim == 1:
            tensors[path] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        values.normal_(0, SPREAD, generator=generator)
        if load_in_4bit and path in linear:
            tensors |= _quantised(path, values)
        else:
            tensors[path] = values.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _quantised(path: str, values) -> dict:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(values, quant_type="nf4", compress_statistics=True)
    statistics = state.as_dict(packed=True)
    return {
        path: packed.cpu(),
        **{f"{path}.{name}": tensor.cpu() for name, tensor in statistics.items()},
    }


def _write_config(folder: Path, name: str, load_in_4bit: bool) -> None:
    from transformers import AutoTokenizer

    from rloo_kit.models.shape import TINY_THINKER

    config = _meta_model(name).config.to_dict() | {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "eos_token_id": 258,  # of the embedded model, whose tokenizer is saved here
        "pad_token_id": 256,
        "bos_token_id": None,
    }
    if load_in_4bit:
        config["quantization_config"] = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    AutoTokenizer.from_pretrained(TINY_THINKER).save_pretrained(folder)
