"""A tiny vision model with random weights, and coloured squares to train it on; no network.

With RUN in a folder that holds both, `rloo-kit train` asks for the colour of each square.
"""

import json
from pathlib import Path

import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "white": (245, 245, 245),
}
QUESTION = "what colour is the square ?"
SIZE = 28  # pixels of a side
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>", "<boi>", "<image>",
           "<eoi>", "<video>"]  # fmt: skip
IDS = {name: place for place, name in enumerate(SPECIAL)}
WORDS = [*COLOURS, *QUESTION.split(), "user", "assistant", "system"]
TEMPLATE = """{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + ' ' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'IMAGE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant ' -}}{%- endif -%}"""
VISION = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
TEXT = {**VISION, "num_attention_heads": 4, "num_key_value_heads": 2}
RUN = """\
model: {name: model, load_in_4bit: false, max_seq_length: 64}
data: {prompts: squares.jsonl, held_out: 4}
rewards: [accuracy]
output_dir: run
trainer:
  max_steps: 2
  num_generations: 4
  per_device_train_batch_size: 8
  gradient_accumulation_steps: 1
  max_completion_length: 2
  learning_rate: 0.01
"""


def make_tokenizer(kind):
    """Return a tokenizer of whole words, with the special tokens of vision models."""
    ids = {name: place for place, name in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(SPECIAL)
    roles = {"image_token": "<image>"}
    if kind == "gemma3":
        roles |= {"boi_token": "<boi>", "eoi_token": "<eoi>"}
    else:
        roles |= {"video_token": "<video>"}
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|im_end|>", unk_token="<unk>",
        padding_side="left", extra_special_tokens=roles,
    )  # fmt: skip


def make_gemma3(tokenizer, template):
    """Return a Gemma 3 of two layers, whose vision tower has layers q_proj, k_proj, v_proj too."""
    config = tf.Gemma3Config(
        text_config={**TEXT, "vocab_size": len(tokenizer), "head_dim": 8, "pad_token_id": 0,
                     "query_pre_attn_scalar": 8, "bos_token_id": 2,
                     "eos_token_id": IDS["<|im_end|>"]},
        vision_config={**VISION, "num_attention_heads": 2, "image_size": SIZE, "patch_size": 7},
        mm_tokens_per_image=4, boi_token_index=IDS["<boi>"], eoi_token_index=IDS["<eoi>"],
        image_token_index=IDS["<image>"], tie_word_embeddings=True,
    )  # fmt: skip
    processor = tf.Gemma3Processor(
        image_processor=tf.Gemma3ImageProcessor(size={"height": SIZE, "width": SIZE}),
        tokenizer=tokenizer,
        chat_template=template.replace("'IMAGE'", "'<boi>'"),
        image_seq_length=4,
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


def make_qwen2_5_vl(tokenizer, template):
    """Return a Qwen2.5-VL of two layers, whose vision tower has an MLP of the same names."""
    config = tf.Qwen2_5_VLConfig(
        text_config={**TEXT, "vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2,
                     "eos_token_id": IDS["<|im_end|>"],
                     "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2],
                                         "rope_theta": 10000.0}},
        vision_config={"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
                       "out_hidden_size": 32, "patch_size": 7, "window_size": 28,
                       "fullatt_block_indexes": [1]},
        image_token_id=IDS["<image>"], video_token_id=IDS["<video>"],
        vision_start_token_id=IDS["<boi>"], vision_end_token_id=IDS["<eoi>"],
        tie_word_embeddings=True,
    )  # fmt: skip
    sizes = {"patch_size": 7, "min_pixels": SIZE * SIZE, "max_pixels": SIZE * SIZE}
    processor = tf.Qwen2_5_VLProcessor(
        image_processor=tf.Qwen2VLImageProcessor(**sizes),
        video_processor=tf.Qwen2VLVideoProcessor(**sizes),
        tokenizer=tokenizer,
        chat_template=template.replace("'IMAGE'", "'<boi><image><eoi>'"),
    )
    return tf.Qwen2_5_VLForConditionalGeneration(config), processor


def save_model(folder, kind="gemma3", seed=0):
    """Write a model and its processor to a folder."""
    makers = {"gemma3": make_gemma3, "qwen2_5_vl": make_qwen2_5_vl}
    torch.manual_seed(seed)
    model, processor = makers[kind](make_tokenizer(kind), TEMPLATE)
    # wide enough for the tied head to prefer a word
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.1)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_squares(folder, num=16):
    """Write squares as PNG, and prompts that name them; return the path of the prompts."""
    folder = Path(folder)
    (folder / "squares").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num):
        name = list(COLOURS)[number % len(COLOURS)]
        shade = tuple(max(0, value - number) for value in COLOURS[name])
        image = f"squares/{number}.png"
        Image.new("RGB", (SIZE, SIZE), shade).save(folder / image)
        rows.append({"prompt": QUESTION, "image": image, "answer": name})
    path = folder / "squares.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
