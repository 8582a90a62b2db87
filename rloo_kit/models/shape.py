"""Shape of a model, computed from its config alone: layers and numbers of parameters.

transformers builds the model on torch's meta device, where tensors have shapes but no memory. So
this works for any architecture, and no weights are read or downloaded. A table in this module has
the shapes of the models in examples/, so that planning them needs no network.
"""

import copy
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import ModelError
from rloo_kit.models.adapters import EMBEDDED, adapter_in, base_of, check_path, revision_of
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TINY_THINKER = EMBEDDED["tiny-thinker"]

# From the config.json that Qwen publishes with each model: hidden size, intermediate size, number
# of layers, number of attention heads, and True if the LM head is tied to the embedding
PUBLISHED = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False),
}
# Number of key-value heads, size of a head, and vocabulary size of all these models
QWEN3_KV_HEADS = 8
QWEN3_HEAD = 128
QWEN3_VOCABULARY = 151_936

# Timeout of a request to the hub
HUB_SECONDS = 10.0

# Estimated fraction of the linear layers' weights that Unsloth's "dynamic" 4-bit models keep in 16
# bit. The real fraction differs from model to model. The estimate is used if the config is missing
# or does not list the layers that stay in 16 bit
DYNAMIC_SHARE = 0.1


@dataclass(frozen=True)
class Linear:
    """All linear layers of a model that have the same name and the same size."""

    name: str  # the last part of the name, such as q_proj
    rows: int  # output features
    columns: int  # input features
    quantised: bool  # True if bitsandbytes quantises them when the model is loaded in 4 bit
    # True for experts that are stored together in one parameter; only Unsloth quantises them
    is_expert: bool
    count: int  # number of these layers

    @property
    def size(self) -> int:
        """Number of weights in one of these layers."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """Layers and sizes of a model."""

    source: str  # where the config comes from, in words
    hidden_size: int
    # width of the MLP; in a mixture of experts the total width of the experts that a token uses
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    linears: tuple[Linear, ...]
    others: int  # number of parameters of embeddings, norms and biases; tied ones count once
    qk_norm: bool  # True if queries and keys are normalised
    packed: bool  # True if the checkpoint has 4-bit weights
    # fraction of the weights of `quantised` layers that a 4-bit checkpoint keeps in 16 bit
    in_16bit: float
    has_vision: bool = False  # True if the model has a vision part

    @property
    def num_parameters(self) -> int:
        """Number of all parameters; tied parameters count once."""
        return self.others + sum(linear.size * linear.count for linear in self.linears)

    @property
    def with_packed_experts(self) -> "ModelShape":
        """The same shape with all experts marked as quantised, as Unsloth loads them in 4 bit."""
        linears = (replace(one, quantised=one.quantised or one.is_expert) for one in self.linears)
        return replace(self, linears=tuple(linears))

    @property
    def kv_size(self) -> int:
        """Size of the keys of a token in one layer, over all heads; also the size of its values."""
        return self.num_kv_heads * self.head_dim


def read_shape(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelShape:
    """Return the shape of a model, reading only its config.

    The config is looked up first on this machine, then in the kit's table, then on the hub.

    Args:
        name: As for ``load_model``. For an adapter the shape of its base model is returned.
        revision: Branch, tag or commit of the model on the hub; None for the main branch.
        trust_remote_code: True to run code that comes with the model.

    Raises:
        ModelError: The config cannot be found, or transformers does not know the model.
    """
    folder = adapter_in(name)
    found, revision = (base_of(folder), revision_of(folder)) if folder else (name, revision)
    check_path(found)
    path = EMBEDDED.get(found, Path(os.path.expanduser(found)))
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    place, source = found, "its config on the hub"
    try:
        if path.suffix == ".gguf":
            place, source = path.parent, "its GGUF file"
            options["gguf_file"] = path.name
        elif path.exists():
            place, source = path, "its config.json"
        elif not _is_cached(found, revision):
            if published := _published_shape(found):
                return published
            from huggingface_hub import get_hf_file_metadata, hf_hub_url

            # a single request; without a network transformers would retry for half a minute
            url = hf_hub_url(found, "config.json", revision=revision)
            get_hf_file_metadata(url, timeout=HUB_SECONDS)
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(place, **options)
        return shape_of_config(config, name, source, trust_remote_code=trust_remote_code)
    except Exception as exc:  # the classes differ by library, version and network
        raise ModelError(
            f"the config of model {format_value(name)} cannot be read ({type(exc).__name__}: "
            f"{first_line(exc)}): check the name and the network, or give a folder that holds its "
            "config.json"
        ) from exc


def _is_cached(name: str, revision: str | None) -> bool:
    """Return True if the hub's cache on this machine has the config of a model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def is_quantised(source: str) -> bool:
    """Return True if the config of a model says that its weights are already quantised.

    ``source`` is a hub name or a folder.
    """
    from transformers import PreTrainedConfig

    config, _ = PreTrainedConfig.get_config_dict(source)
    parts = (config, config.get("text_config") or {})  # the second one is of a vision model
    return any(part.get("quantization_config") for part in parts)


def _published_shape(name: str) -> ModelShape | None:
    """Return the shape of a Qwen3 model from the kit's table; None if the table does not have it.

    The model is found by a part of its name, such as ``Qwen3-8B``. Neither torch nor transformers
    is imported.
    """
    # must not match Qwen3-30B-A3B, a mixture of experts
    match = re.search(r"qwen3-\d+(?:\.\d+)?b(?![a-z0-9])(?!-a\d)", name.lower())
    values = PUBLISHED.get(match[0]) if match else None
    if values is None:
        return None
    hidden, inner, layers, heads, tied = values
    queries = heads * QWEN3_HEAD
    keys = QWEN3_KV_HEADS * QWEN3_HEAD
    sizes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    embeddings = QWEN3_VOCABULARY * hidden * (1 if tied else 2)
    # norms of attention, MLP, queries and keys in each layer, and the final norm
    norms = layers * 2 * (hidden + QWEN3_HEAD) + hidden
    return ModelShape(
        source="rloo-kit's table",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=QWEN3_KV_HEADS,
        head_dim=QWEN3_HEAD,
        vocab_size=QWEN3_VOCABULARY,
        linears=tuple(Linear(leaf, *size, True, False, layers) for leaf, size in sizes.items()),
        others=embeddings + norms,
        qk_norm=True,
        packed="bnb-4bit" in name.lower(),
        in_16bit=DYNAMIC_SHARE if "unsloth-bnb-4bit" in name.lower() else 0.0,
    )


def shape_of_config(
    config: "PreTrainedConfig",
    name: str,
    source: str = "its config",
    *,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Return the shape of the model that transformers builds from a config.

    Args:
        config: The config, which is not changed.
        name: Name of the model, which may show how it is quantised.
        source: Where the config comes from, in words.
        trust_remote_code: True to run code that comes with the model.
    """
    import torch

    config = copy.deepcopy(config)
    text = config.get_text_config()
    settings = config.to_dict().get("quantization_config") or {}
    skipped = settings.get("llm_int8_skip_modules") or ()
    vars(config).pop("quantization_config", None)  # to get the layers' sizes before quantisation
    with torch.device("meta"):  # where a model needs no memory
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    linears = _linears(model, skipped)
    heads = text.num_attention_heads
    inner = largest_size(text, "intermediate_size") or 4 * text.hidden_size
    if expert := getattr(text, "moe_intermediate_size", None):
        inner = (getattr(text, "num_experts_per_tok", None) or 1) * expert
    norms = (".q_norm", ".q_layernorm")
    guessed = "unsloth-bnb-4bit" in name.lower() and not skipped
    return ModelShape(
        source=source,
        hidden_size=text.hidden_size,
        intermediate_size=inner,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=largest_size(text, "num_key_value_heads") or heads,
        head_dim=largest_size(text, "head_dim") or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        linears=linears,
        others=model.num_parameters() - sum(linear.size * linear.count for linear in linears),
        qk_norm=any(module.endswith(norms) for module, _ in model.named_modules()),
        packed=bool(settings.get("load_in_4bit")),
        in_16bit=DYNAMIC_SHARE if guessed else 0.0,
        has_vision=hasattr(config, "vision_config"),
    )


def largest_size(config: "PreTrainedConfig", name: str) -> int:
    """Return the largest value over all layers of a size in a config, such as ``head_dim``.

    Layers may have different values: in Gemma 4 each layer has its own config, and in Gemma 3n the
    value is a list. The result is 0 if the config does not have the size.
    """
    layers: Any = config.per_layer_config if config.is_heterogeneous else [config]
    values = [getattr(layer, name, None) or 0 for layer in layers]
    return max(max(one) if isinstance(one, list) else one for one in values)


def auto_class(config: "PreTrainedConfig", *, images: bool = False) -> Any:
    """Return the transformers class that loads a model.

    It is AutoModelForImageTextToText if ``images`` is true, or if the config is that of a vision
    model. Otherwise it is AutoModelForCausalLM.
    """
    import transformers

    # Qwen3.5 also has a class without the vision part, in which layers have other names. An adapter
    # fits only one of the two, and Unsloth and vLLM use the class with the vision part
    if images or type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _linears(model: Model, skipped: Iterable[str]) -> tuple[Linear, ...]:
    """Return the linear layers of a model without its LM head.

    Experts that are stored in three-dimensional parameters are included.

    Args:
        model: The model.
        skipped: Parts of names; layers whose names contain one of them are not quantised.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    found: Counter[Any] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head:
            size = module.weight.shape
            if isinstance(module, Conv1D):  # of GPT-2, with transposed weights
                size = size[::-1]
            is_quantised = not any(part in name for part in skipped)
            found[name.rpartition(".")[2], *size, is_quantised, False] += 1
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "experts" in name:  # number of experts, rows, columns
            number, *size = parameter.shape
            found[f"experts.{name.rpartition('.')[2]}", *size, False, True] += number
    return tuple(Linear(*key, count=count) for key, count in found.items())


def weight_bytes(shape: ModelShape, *, in_4bit: bool, value_bytes: int = 2) -> int:
    """Return the memory that the weights of a loaded model need, in bytes.

    Args:
        shape: The shape of the model.
        in_4bit: True if linear layers are loaded as NF4 with double quantisation. Embeddings, norms
            and the LM head are never quantised.
        value_bytes: Bytes of a weight that is not in 4 bit.
    """
    total = shape.others * value_bytes
    for linear in shape.linears:
        size = linear.size * value_bytes
        if in_4bit and linear.quantised:
            packed = nf4_bytes(linear.rows, linear.columns)
            size = packed * (1 - shape.in_16bit) + size * shape.in_16bit
        total += linear.count * size
    return int(total)


def nf4_bytes(rows: int, columns: int) -> int:
    """Return the size in bytes of an NF4 layer of bitsandbytes 0.50 with double quantisation.

    Args:
        rows: Output features of the layer.
        columns: Input features of the layer.
    """
    # two weights in a byte; for each 64 weights their maximum in 8 bit; for each 256 maxima their
    # maximum in float32; the mean of the maxima, and two code tables (functional.py: quantize_4bit)
    weights = rows * columns
    blocks = -(-weights // 64)
    return -(-weights // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)
