"""Tokens per second and peak memory of the transformers sampler, against ``generate``.

    python benchmarks/sampler.py --name sampler_smollm2        # about 10 minutes on two CPU cores

SmolLM2-135M with an adapter samples eight completions for each of two prompts. Their lengths are
given (mean 52, longest 256, as the model samples them in training), so that both arms decode the
same number of tokens. The arms run in turn, A B A B. Peak memory is the largest resident set of the
process while it samples, minus the resident set before.
"""

import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import psutil
from shared import ROOT, SMOLLM2, in_turn, parser_of, ratios, read_lines, write_result

import rloo_kit as rk

rk.setup()

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.utils import logging

from rloo_kit.machine.cleanup import take_peak
from rloo_kit.sampling.decoding import complete

# Drawn from the model once; the mean is 52
LENGTHS = [10, 14, 17, 17, 19, 21, 22, 27, 27, 35, 42, 50, 57, 74, 144, 256]
MIB = 1024**2


class GivenLengths(LogitsProcessor):
    """Logits processor that ends each completion at its given length.

    It forces the first token of a completion to 1000 plus the number of its row. Later it reads the
    number from there, because the sampler drops the rows that have ended.
    """

    def __init__(self, lengths: list[int], start: int, end: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.start = start
        self.end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        done = input_ids.size(1) - self.start
        scores = scores.clone()
        if not done:
            rows = torch.arange(len(scores))
            scores[:] = -torch.inf
            scores[rows, rows + 1000] = 0.0
            return scores
        ends = self.lengths[input_ids[:, self.start] - 1000] == done + 1
        scores[:, self.end] = -torch.inf
        scores[ends] = -torch.inf
        scores[ends, self.end] = 0.0
        return scores


def measure(draw: Callable[[], list[list[int]]]) -> tuple[float, float]:
    """Return the tokens per second, and the peak memory in MiB minus the memory before."""
    gc.collect()
    before = psutil.Process().memory_info().rss
    take_peak()
    started = time.perf_counter()
    completions = draw()
    seconds = time.perf_counter() - started
    peak = take_peak()
    assert [len(ids) for ids in completions] == LENGTHS
    return sum(LENGTHS) / seconds, (peak - before) / MIB


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", help="name of the file in benchmarks/results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    model, tokenizer = rk.load_model(str(SMOLLM2), max_seq_length=1024, load_in_4bit=False)
    model = rk.attach_lora(model, r=16, seed=1).eval()
    posts = [row["post"] for row in read_lines(ROOT / "examples" / "posts.jsonl")[:2]]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{post}\n\nSum up in one short sentence."}],
            add_generation_prompt=True, return_dict=True,
        )["input_ids"]
        for post in posts for _ in range(8)
    ]  # fmt: skip
    width = max(map(len, prompts))
    pad = tokenizer.pad_token_id
    end = tokenizer.eos_token_id
    how = {
        "generation_config": GenerationConfig(
            max_new_tokens=256, do_sample=True, top_k=0, pad_token_id=pad, eos_token_id=end
        ),
        "logits_processor": LogitsProcessorList([GivenLengths(LENGTHS, width, end)]),
    }

    def by_generate() -> list[list[int]]:
        padded = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left")
        rows = model.generate(**padded, **how)[:, width:].tolist()
        return [ids[: ids.index(end) + 1] for ids in rows]

    arms = {"kit": lambda: complete(model, prompts, pad, [end], **how), "generate": by_generate}
    with torch.no_grad():
        found = in_turn(
            {name: functools.partial(measure, draw) for name, draw in arms.items()},
            options.pairs,
            lambda name, one: print(f"{name:<9} {one[0]:6.1f} tokens a second, {one[1]:+.0f} MiB"),
        )
    speeds = {name: [speed for speed, _ in rows] for name, rows in found.items()}
    ratio, all_ratios = ratios(speeds["kit"], speeds["generate"])
    print(f"kit against generate: {ratio:.2f}x")
    medians = {
        name: {
            "tokens_per_second": statistics.median(speeds[name]),
            "peak_mib": statistics.median(memory for _, memory in rows),
        }
        for name, rows in found.items()
    }
    write_result(options.name, lengths=LENGTHS, ratio=ratio, ratios=all_ratios, **medians)


if __name__ == "__main__":
    main()
