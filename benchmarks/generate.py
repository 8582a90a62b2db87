"""Sampling: tokens/s and seconds to send the policy, at even and skewed lengths, one process.

    .venv-vllm/bin/python benchmarks/generate.py                 # the embedded model
    .venv-vllm/bin/python benchmarks/generate.py --model FOLDER  # another one

Every arm completes the same prompts with the same LoRA adapter, in the order A B A B: transformers
``generate`` and the kit's vLLM engine. Each completion stops where the length distribution says:
the engine gets them, and ``generate`` pads the finished rows until the longest is done, as in
training. What counts are the tokens wanted.
"""

import functools
import gc
import random
import statistics
import time
import warnings
from collections.abc import Callable

from shared import in_turn, parser_of, ratios, skewed, write_result

import rloo_kit as rk

environment = rk.setup()

import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from rloo_kit.sampling.engine import Sampling
from rloo_kit.sampling.vllm_inprocess import VllmEngine


def even(longest: int, number: int) -> list[int]:
    """Every completion within a tenth of the same length."""
    rng = random.Random(0)
    return [round(longest * rng.uniform(0.9, 1.0)) for _ in range(number)]


class StopAt(StoppingCriteria):
    """Ends each row at a length of its own."""

    def __init__(self, lengths: list[int], start: int) -> None:
        self.ends = torch.tensor(lengths) + start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return (input_ids.size(1) >= self.ends).to(input_ids.device)


def transformers_arm(model: object, tokenizer: object, prompts: list[list[int]]) -> object:
    def run(lengths: list[int]) -> int:
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt", padding_side="left").to(
            model.device
        )
        start = inputs["input_ids"].size(1)
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                do_sample=True,
                use_cache=True,
                max_new_tokens=max(lengths),
                eos_token_id=-1,  # only the wanted length ends a row
                pad_token_id=tokenizer.pad_token_id,
                stopping_criteria=StoppingCriteriaList([StopAt(lengths, start)]),
            )
        assert output.size(1) - start == max(lengths)
        return sum(lengths)

    return run


def engine_arm(engine: VllmEngine, prompts: list[list[int]]) -> object:
    from vllm import SamplingParams

    def run(lengths: list[int]) -> int:
        base = Sampling(max(lengths), ()).as_vllm()
        parameters = [
            SamplingParams(**{**base, "max_tokens": n, "ignore_eos": True, "seed": row})
            for row, n in enumerate(lengths)
        ]
        outputs = engine._llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts],
            parameters,
            lora_request=engine._request,
            use_tqdm=False,
        )
        done = [len(output.outputs[0].token_ids) for output in outputs]
        assert done == lengths
        return sum(done)

    return run


def speed_of(arm: Callable[[list[int]], int], lengths: list[int]) -> float:
    """Return tokens a second."""
    gc.collect()
    started = time.perf_counter()
    return arm(lengths) / (time.perf_counter() - started)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="tiny-thinker")
    parser.add_argument("--load-in-4bit", action="store_true")
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--name", help="of the file in benchmarks/results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    model, tokenizer = rk.load_model(
        options.model, max_seq_length=options.longest + 64, load_in_4bit=options.load_in_4bit
    )
    model = rk.attach_lora(model, r=16)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    getattr(model, "for_inference", model.eval)()  # Unsloth's fast decoding, where it has one
    rows = []
    ids = tokenizer("12 + 34 = ")["input_ids"]
    prompts = [ids] * options.completions
    engine = VllmEngine(model, max_length=options.longest + 64, num_sequences=options.completions)
    syncs = []
    for _ in range(6):
        engine.sync(model)
        syncs.append(engine.sync_seconds)
    arms = {
        "transformers": transformers_arm(model, tokenizer, prompts),
        "kit": engine_arm(engine, prompts),
    }
    for lengths_name, lengths_of in (("even", even), ("skewed", skewed)):
        lengths = lengths_of(options.longest, options.completions)
        speeds = in_turn(
            {name: functools.partial(speed_of, arm, lengths) for name, arm in arms.items()},
            options.pairs,
        )
        ratio, all_ratios = ratios(speeds["kit"], speeds["transformers"])
        row = {
            "lengths": lengths_name,
            "padded_per_real": max(lengths) * len(lengths) / sum(lengths),
            **{f"tokens_per_second_{name}": statistics.median(s) for name, s in speeds.items()},
            "ratio": ratio,
            "ratios": all_ratios,
        }
        rows.append(row)
        print(row, flush=True)
    print(f"sync: {statistics.median(syncs[1:]):.3f} s")
    engine.close()
    sizes = {name: getattr(options, name) for name in ("completions", "longest", "pairs")}
    write_result(options.name, **sizes, rows=rows, sync_seconds=syncs)


if __name__ == "__main__":
    main()
