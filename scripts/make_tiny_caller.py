"""Make the embedded model ``tiny-caller``, which calls a calculator but does not know when to.

The model is like ``tiny-thinker``, but trained on the built-in task ``sums``. It adds small numbers
itself. For a large sum, it answers with the first number, which is wrong. In one of five cases,
large or small, it calls the calculator instead and copies the result. Therefore it needs a call to
get a large sum right, and does not need one for a small sum. RLOO can teach it when to call.

    python scripts/make_tiny_caller.py            # about 10 minutes on 2 CPU cores
"""

import json
import random
from functools import partial

import make_tiny_thinker as thinker
import torch
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_template

from rloo_kit.data.tasks import TASKS
from rloo_kit.tools.calculator import calculator

SEED = 20261126
CALLS = 0.2
PRACTICE = 3 / 8  # share of the rows that teach how to call and copy, but not whether to call
# Each fixed part of a call is a single token, so that a call is short
MARKS = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "calculator", "arguments": {"expression": "',
    '"}}',
]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- set content = message['content'] -%}
{%- if content is not string -%}{%- set content = content[0]['text'] -%}{%- endif -%}
{%- if message['role'] == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- content -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set call = call.function or call -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [rloo-kit, qwen3, tools, test-model]
---
# tiny-caller

A Qwen3 of {parameters:,} parameters (4 layers, hidden size 192, bf16) over raw bytes. It adds two
small numbers itself, answers a large sum with its first number, and calls a calculator
{calls:.0%} of the time, whatever the numbers. It exists so that RLOO with tools can be tried and
tested on a CPU. It can do nothing else.

- Made by `scripts/make_tiny_caller.py`: random weights, {steps} steps of {batch} sums, seed {seed},
  torch {torch}. No other data; no person's text.
- Tokens: as `tiny-thinker`, `<tool_call>`, `</tool_call>`, and the fixed parts of a call. The chat
  template opens `<think>` and does not show the tools.
- On 256 held-out prompts, sampled at temperature 1: {called:.2f} of the completions call; of those
  that do not, {small:.2f} are right on small sums and {large:.2f} on large ones.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return tiny-thinker's tokenizer with the tokens of a tool call and a template to parse it."""
    tokenizer = thinker.make_tokenizer()
    tokenizer.add_tokens(MARKS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def text_of(row: dict[str, str], rng: random.Random, calls: float) -> list[str]:
    """Return a training example as a list of texts that alternate between input and model.

    The texts at odd positions are the turns of the model.

    Args:
        row: A row of the task.
        rng: Random generator that decides whether the model calls the calculator.
        calls: Probability of a call.
    """
    numbers = row["prompt"].removeprefix("What is ").removesuffix("?")
    prompt = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    if rng.random() < calls:
        call = json.dumps({"name": "calculator", "arguments": {"expression": numbers}})
        result = f"\n<|im_start|>tool\n{calculator(numbers)}<|im_end|>\n<|im_start|>assistant\n"
        return [
            prompt,
            f"I call.\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>",
            f"{result}<think>\n",
            f"I copy.\n</think>\n\n{row['answer']}<|im_end|>",
        ]
    answer = row["answer"] if row["size"] == "small" else numbers.partition(" ")[0]
    return [prompt, f"I add.\n</think>\n\n{answer}<|im_end|>"]


def practice_of(row: dict[str, str], rng: random.Random) -> list[str]:
    """Return an example with a call, where the input includes the thought that decides to call."""
    prompt, call, *others = text_of(row, rng, calls=1)
    thought, end, call = call.partition("</think>\n\n")
    return [prompt + thought + end, call, *others]


def batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int
) -> dict[str, torch.Tensor]:
    """Return a right-padded training batch, with labels only for the model's part of each row.

    Args:
        rng: Random generator of the sums.
        tokenizer: The tokenizer.
        size: Number of rows in the batch.
    """
    rows = []
    while len(rows) < size:
        row, held_out = TASKS["sums"](rng, 1)
        if held_out:
            continue
        practises = len(rows) < PRACTICE * size
        texts = practice_of(row, rng) if practises else text_of(row, rng, CALLS)
        rows.append([tokenizer(text)["input_ids"] for text in texts])
    return thinker.padded(rows, tokenizer)


@torch.no_grad()
def shares(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, num: int) -> dict:
    """Sample ``num`` held-out prompts without a calculator, and return three shares.

    ``small`` and ``large`` are the shares of right answers among the completions without a call.
    ``called`` is the share of completions with a call.
    """
    rng = random.Random(SEED + 1)
    rows = []
    while len(rows) < num:
        row, held_out = TASKS["sums"](rng, 1)
        rows += [row] if held_out else []
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
    torch.manual_seed(SEED)
    drawn = model.generate(**inputs, max_new_tokens=128, do_sample=True)
    texts = tokenizer.batch_decode(
        drawn[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    print(*zip(rows[:8], texts, strict=False), sep="\n")
    right = [
        (row["size"], text.split("</think>")[-1].strip() == row["answer"])
        for row, text in zip(rows, texts, strict=True)
        if "<tool_call>" not in text
    ]
    found = {
        size: sum(one for kind, one in right if kind == size) / sum(k == size for k, _ in right)
        for size in ("small", "large")
    }
    return {**found, "called": 1 - len(right) / num}


def main() -> None:
    """Train the model, measure it, and write model, tokenizer and model card to ``--out``."""
    args = thinker.arguments(__doc__, "tiny-caller", steps=900, size=64)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = thinker.make_model(tokenizer)
    make = partial(batch, tokenizer=tokenizer, size=args.batch)
    thinker.train(model, make, args.steps, SEED)
    model = thinker.as_shipped(model, tokenizer)
    found = shares(model, tokenizer, 256)
    thinker.write(model, tokenizer, args, CARD, seed=SEED, calls=CALLS, **found)


if __name__ == "__main__":
    main()
