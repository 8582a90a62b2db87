"""Make the embedded model ``tiny-thinker``: tokenizer, weights and model card.

The model is a Qwen3 with about 1.4M parameters that reads raw bytes. It is trained from random
weights on sums of two three-digit numbers, with a thought that adds them digit by digit. In the
training data, three of five carries are forgotten. Therefore the model knows how to carry but does
so only sometimes, and earns the reward only sometimes. RLOO needs such a policy, and real models
behave in the same way.

    python scripts/make_tiny_thinker.py            # about 8 minutes on 2 CPU cores

The held-out sums (``is_held_out``) are in neither this training set nor the prompts that
``rloo_kit.load_prompts("arithmetic")`` trains on.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from worked_thought import worked_thought

from rloo_kit.data.tasks import arithmetic_prompt, is_held_out

SEED = 20261121
FORGET_CARRY = 0.6
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTROL = ["<think>", "</think>"]  # not "special", as in Qwen3: decoded text keeps them
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- if content is not string -%}{%- set content = content[0]['text'] -%}{%- endif -%}
{%- if message['role'] == 'assistant' and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


CARD = """\
---
license: apache-2.0
language: en
library_name: transformers
tags: [rloo-kit, qwen3, arithmetic, test-model]
---
# tiny-thinker

A Qwen3 of {parameters:,} parameters (4 layers, hidden size 192, bf16) over raw bytes. It adds two
three-digit numbers, digit by digit inside `<think>`, and deliberately forgets carries: it knows how
to carry and is unsure whether to. It exists so that RLOO can be tried and tested in a minute on a
CPU. It can do nothing else.

- Made by `scripts/make_tiny_thinker.py`: random weights, {steps} steps of {batch} sums,
  seed {seed}, about 8 minutes on 2 CPU cores, torch {torch}. The worked thoughts drop
  {forget_carry:.0%} of the carries. No other data; no person's text.
- Tokens: 256 bytes, `<|endoftext|>` (pad), `<|im_start|>`, `<|im_end|>` (eos), `<think>`,
  `</think>`. The chat template opens `<think>` in the prompt, as Qwen3-Thinking's does.
- Accuracy on 256 held-out sums (in no training set, `rloo_kit.data.tasks.is_held_out`):
  {accuracy_sampled:.2f} sampled at temperature 1, {accuracy_greedy:.2f} greedy, where it drops
  nearly every carry.
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with 256 bytes, three special tokens, and the think tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 with random weights.

    The input size of every layer is a multiple of 64, which 4-bit weights on a CPU require.
    """
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    return Qwen3ForCausalLM(config)


def draw_sum(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    """Draw two three-digit numbers at random whose sum is, or is not, held out."""
    while True:
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        if is_held_out(a, b) == held_out:
            return a, b


def prompt_text(tokenizer: PreTrainedTokenizerFast, a: int, b: int) -> str:
    """Return the prompt that asks for a sum, rendered by the chat template."""
    messages = [{"role": "user", "content": arithmetic_prompt(a, b)}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def sample(rng: random.Random, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Draw a training sum at random, and return (prompt_ids, completion_ids)."""
    a, b = draw_sum(rng, held_out=False)
    thought, answer = worked_thought(a, b, forgets=lambda: rng.random() < FORGET_CARRY)
    completion = f"{thought}\n</think>\n\n{answer}<|im_end|>"
    return tokenizer(prompt_text(tokenizer, a, b))["input_ids"], tokenizer(completion)["input_ids"]


def batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int
) -> dict[str, torch.Tensor]:
    """Return a right-padded training batch, with labels only for the completions."""
    return padded([sample(rng, tokenizer) for _ in range(size)], tokenizer)


def padded(
    rows: Sequence[Sequence[list[int]]], tokenizer: PreTrainedTokenizerFast
) -> dict[str, torch.Tensor]:
    """Return a right-padded batch of rows whose token ids are in parts.

    The parts at odd positions have labels; the loss ignores the other parts.
    """
    shape = (len(rows), max(sum(map(len, parts)) for parts in rows))
    ids = torch.full(shape, tokenizer.pad_token_id)
    labels = torch.full(shape, -100)
    for number, parts in enumerate(rows):
        end = 0
        for place, part in enumerate(parts):
            start, end = end, end + len(part)
            ids[number, start:end] = torch.tensor(part)
            if place % 2:
                labels[number, start:end] = ids[number, start:end]
    return {
        "input_ids": ids,
        "attention_mask": (ids != tokenizer.pad_token_id).long(),
        "labels": labels,
    }


def train(
    model: Qwen3ForCausalLM,
    make_batch: Callable[[random.Random], dict[str, torch.Tensor]],
    steps: int,
    seed: int,
) -> None:
    """Train the model in place with AdamW, a short learning rate warm-up and a linear decay.

    Args:
        model: The model.
        make_batch: Function that returns the next batch, drawn with a random generator.
        steps: Number of optimizer steps.
        seed: Seed of the random generator.
    """
    rng = random.Random(seed)
    peak = 3e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=0.01, betas=(0.9, 0.98))
    warmup = 50
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warmup, max(0.02, (steps - s) / (steps - warmup)))
    )
    start = time.perf_counter()
    for step in range(steps):
        loss = model(**make_batch(rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(
                f"step {step} loss {loss.item():.4f} {time.perf_counter() - start:.0f} s",
                flush=True,
            )


@torch.no_grad()
def accuracy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, do_sample: bool, num: int = 256
) -> float:
    """Return the share of right answers over ``num`` held-out sums."""
    rng = random.Random(SEED + 1)
    sums = [draw_sum(rng, held_out=True) for _ in range(num)]
    texts = [prompt_text(tokenizer, a, b) for a, b in sums]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    torch.manual_seed(SEED)
    out = model.generate(**inputs, max_new_tokens=64, do_sample=do_sample)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if do_sample:
        print(*[(s, t) for s, t in zip(sums[:6], texts, strict=False)], sep="\n")
    return (
        sum(
            t.split("</think>")[-1].strip() == str(a + b)
            for t, (a, b) in zip(texts, sums, strict=True)
        )
        / num
    )


def arguments(text: str, name: str, steps: int, size: int) -> argparse.Namespace:
    """Parse the command line of a script that makes an embedded model, and return the arguments.

    Args:
        text: Description of the script.
        name: Name of the model, which is also the name of its folder.
        steps: Default number of training steps.
        size: Default number of rows in a batch.
    """
    parser = argparse.ArgumentParser(description=text)
    assets = Path(__file__).parents[1] / "rloo_kit" / "assets"
    parser.add_argument("--out", type=Path, default=assets / name)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--batch", type=int, default=size)
    return parser.parse_args()


def as_shipped(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return the trained model in bf16, with the generation config that is saved with it."""
    model = model.to(torch.bfloat16).eval()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")],
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def write(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace,
    card: str, **measured: float,
) -> None:  # fmt: skip
    """Write the model, its tokenizer, ``made.json`` and the model card to the folder ``args.out``.

    Args:
        model: The model.
        tokenizer: The tokenizer.
        args: Arguments of the script.
        card: Template of the model card.
        **measured: Settings and results of the training, for ``made.json`` and the card.
    """
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "batch": args.batch,
        **measured,
        "torch": torch.__version__.split("+")[0],
    }
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "made.json").write_text(json.dumps(facts, indent=2) + "\n")
    (args.out / "README.md").write_text(card.format(**facts))
    (args.out / "model.safetensors").chmod(0o644)
    print(json.dumps(facts, indent=2))


def main() -> None:
    """Train the model, measure it, and write model, tokenizer and model card to ``--out``."""
    args = arguments(__doc__, "tiny-thinker", steps=700, size=96)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}")
    train(model, partial(batch, tokenizer=tokenizer, size=args.batch), args.steps, SEED)
    model = as_shipped(model, tokenizer)
    write(
        model, tokenizer, args, CARD,
        seed=SEED,
        forget_carry=FORGET_CARRY,
        accuracy_sampled=accuracy(model, tokenizer, do_sample=True),
        accuracy_greedy=accuracy(model, tokenizer, do_sample=False),
    )  # fmt: skip


if __name__ == "__main__":
    main()
