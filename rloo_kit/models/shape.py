"""Shape of a model from its config alone: layers and numbers of parameters.

transformers builds the model on torch's meta device, where tensors have shapes but no memory, so
that any architecture is counted and no weights are opened or downloaded. The shapes of the models
in examples/ are in a table here, so that a plan of them needs no network.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.errors import ModelError
from rloo_kit.models.adapters import EMBEDDED, adapter_in, base_of, check_path
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TINY_THINKER = EMBEDDED["tiny-thinker"]

# From the config.json that Qwen publishes with each model: hidden and intermediate size, layers,
# heads, and whether the LM head is the embedding
PUBLISHED = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False),
}
# Heads of keys and values, size of a head, and tokens of all of them
QWEN3_KV_HEADS = 8
QWEN3_HEAD = 128
QWEN3_VOCABULARY = 151_936

# Longest wait for an answer of the hub
HUB_SECONDS = 10.0

# Estimated share of the linear layers' weights that Unsloth's "dynamic" 4-bit models keep in 16
# bit, for models whose config is not available; it differs by model
DYNAMIC_SHARE = 0.1


@dataclass(frozen=True)
class Linear:
    """Linear layers of one name and one size."""

    name: str  # its last part: q_proj
    rows: int  # output features
    columns: int  # input features
    count: int
    quantised: bool  # bitsandbytes packs it if the model is loaded in 4 bit
    is_expert: bool = False  # one of the experts in one parameter, which only Unsloth packs

    @property
    def size(self) -> int:
        """Number of weights in one of these layers."""
        return self.rows * self.columns


@dataclass(frozen=True)
class ModelShape:
    """Layers and sizes of a model."""

    name: str
    source: str  # place of its config, in words
    hidden_size: int
    intermediate_size: int  # of the MLP, or of all experts that a token uses together
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    linears: tuple[Linear, ...]
    others: int  # parameters of embeddings, norms and biases; tied ones count once
    qk_norm: bool = False  # queries and keys are normalised
    packed: bool = False  # the checkpoint holds 4-bit weights
    in_16bit: float = 0.0  # share of the quantised layers' weights that stays in 16 bit

    @property
    def num_parameters(self) -> int:
        """All parameters, tied ones once."""
        return self.others + sum(linear.size * linear.count for linear in self.linears)

    @property
    def with_packed_experts(self) -> "ModelShape":
        """The shape as loaded by Unsloth in 4 bit, which packs experts too."""
        linears = (replace(one, quantised=one.quantised or one.is_expert) for one in self.linears)
        return replace(self, linears=tuple(linears))

    @property
    def query_size(self) -> int:
        """Elements of all queries of a token in one layer."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all keys of a token in one layer; its values have as many."""
        return self.num_kv_heads * self.head_dim


def read_shape(name: str, *, trust_remote_code: bool = False) -> ModelShape:
    """Return the shape of a model; only its config is read.

    A config on this machine comes first, then the kit's table, then the hub. ``name`` is as for
    ``load_model``; for an adapter the shape of its base is returned.

    Raises:
        ModelError: There is no config, or transformers does not know the model.
    """
    folder = adapter_in(name)
    found = name if folder is None else base_of(folder)
    check_path(found)
    try:
        published = None if _is_here(found) else _published_shape(found)
        if published is not None:
            return replace(published, name=name)
        config, source = _read_config(found, trust_remote_code)
        return shape_of_config(config, name, source, trust_remote_code=trust_remote_code)
    except Exception as exc:  # the classes differ by library, version and network
        raise ModelError(
            f"the config of model {format_value(name)} cannot be read ({type(exc).__name__}: "
            f"{first_line(exc)}): check the name and the network, or give a folder that holds its "
            "config.json"
        ) from exc


def _read_config(name: str, trust_remote_code: bool) -> tuple[Any, str]:
    """Return transformers' config of a model, and its place in words."""
    path = EMBEDDED.get(name, Path(name).expanduser())
    source = "the hub's copy"
    if not path.exists() and not _is_here(name):
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        # one request: without a network transformers would retry for half a minute
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
        source = "the hub"
    from transformers import AutoConfig

    options = {"trust_remote_code": trust_remote_code}
    if path.suffix == ".gguf":
        where = {"gguf_file": path.name}
        return AutoConfig.from_pretrained(path.parent, **where, **options), "its GGUF file"
    if path.is_dir():
        return AutoConfig.from_pretrained(path, **options), "its config.json"
    return AutoConfig.from_pretrained(name, **options), source


def _is_here(name: str) -> bool:
    """Return whether the config is in a folder or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    return Path(name).expanduser().exists() or isinstance(
        try_to_load_from_cache(name, "config.json"), str
    )


def _published_shape(name: str) -> ModelShape | None:
    """Return the shape of a Qwen3 model in the kit's table, by a part of its name, or None.

    It imports neither torch nor transformers.
    """
    # not Qwen3-30B-A3B, a mixture of experts
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
    norms = layers * 2 * (hidden + QWEN3_HEAD) + hidden  # both blocks, queries and keys; the last
    return ModelShape(
        name=name,
        source="rloo-kit's table",
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=QWEN3_KV_HEADS,
        head_dim=QWEN3_HEAD,
        vocab_size=QWEN3_VOCABULARY,
        linears=tuple(Linear(leaf, *size, layers, True) for leaf, size in sizes.items()),
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
        name: Name of the model, which may tell how it is quantised.
        source: Place of the config, in words.
        trust_remote_code: Run code that comes with the model.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    settings = config.to_dict().get("quantization_config") or {}
    skipped = settings.get("llm_int8_skip_modules") or ()
    model = _on_meta(config, trust_remote_code)
    linears = _linears(model, skipped)
    heads = text.num_attention_heads
    everything = sum(parameter.numel() for parameter in model.parameters())
    leaves = {module.rpartition(".")[2] for module, _ in model.named_modules()}
    guessed = "unsloth-bnb-4bit" in name.lower() and not skipped
    return ModelShape(
        name=name,
        source=source,
        hidden_size=text.hidden_size,
        intermediate_size=_intermediate(text),
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=text.vocab_size,
        linears=linears,
        others=everything - sum(linear.size * linear.count for linear in linears),
        qk_norm=not leaves.isdisjoint(("q_norm", "q_layernorm")),
        packed=bool(settings.get("load_in_4bit")),
        in_16bit=DYNAMIC_SHARE if guessed else 0.0,
    )


def auto_class(config: "PreTrainedConfig", *, images: bool = False) -> Any:
    """Return the class of transformers that loads a model.

    It is AutoModelForImageTextToText if ``images`` is true or transformers has no class for the
    model's text alone, else AutoModelForCausalLM.
    """
    import transformers

    vision = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    text = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if images or (type(config) in vision and type(config) not in text):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def _on_meta(config: "PreTrainedConfig", trust_remote_code: bool) -> Any:
    """Return the model on torch's meta device, without memory."""
    import torch

    vars(config).pop("quantization_config", None)  # build the layers before they are packed
    with torch.device("meta"):
        model = auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    return model


def _linears(model: Model, skipped: Iterable[str]) -> tuple[Linear, ...]:
    """Return the linear layers without the LM head; 4 bit skips names that contain ``skipped``."""
    import torch

    head = model.get_output_embeddings()
    found = Counter(
        (
            name.rpartition(".")[2],
            module.out_features,
            module.in_features,
            not any(part in name for part in skipped),
        )
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    dense = [Linear(*key[:3], count, key[3]) for key, count in found.items()]
    return (*dense, *_experts(model))


def _experts(model: Model) -> Iterator[Linear]:
    """Yield experts whose layer holds all of them in one parameter of three dimensions."""
    found = Counter(
        (name.rpartition(".")[2], *parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3 and "experts" in name
    )
    for (leaf, number, rows, columns), layers in found.items():
        yield Linear(f"experts.{leaf}", rows, columns, number * layers, False, True)


def _intermediate(text: Any) -> int:
    """Return the width of the MLP for a token."""
    dense = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    expert = getattr(text, "moe_intermediate_size", None)
    chosen = getattr(text, "num_experts_per_tok", None) or 1
    return chosen * expert if expert else dense


def weight_bytes(shape: ModelShape, *, in_4bit: bool, value_bytes: int = 2) -> int:
    """Return the memory of a model's weights when they are loaded, in bytes.

    Args:
        shape: The model.
        in_4bit: Linear layers are loaded as NF4 with double quantisation; embeddings, norms and LM
            head are not.
        value_bytes: Bytes of a weight that is not in 4 bit.
    """
    total: float = shape.others * value_bytes
    for linear in shape.linears:
        size: float = linear.size * value_bytes
        if in_4bit and linear.quantised:
            packed = nf4_bytes(linear.rows, linear.columns)
            size = packed * (1 - shape.in_16bit) + size * shape.in_16bit
        total += linear.count * size
    return int(total)


def nf4_bytes(rows: int, columns: int) -> int:
    """Return the bytes of an NF4 layer of bitsandbytes 0.50 with double quantisation."""
    # two weights in a byte; the largest of 64 weights in 8 bit; the largest of 256 of those in
    # float32; their mean, and two code tables (functional.py: quantize_4bit)
    weights = rows * columns
    blocks = -(-weights // 64)
    return -(-weights // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)
