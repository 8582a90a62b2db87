"""Seconds of rloo-kit eval: 256 prompts with 4 completions each, with the embedded model.

    python benchmarks/evaluate.py    # prints, and writes benchmarks/results/evaluate_cpu.json

The seconds for loading the libraries are separate: they do not depend on the number of prompts.
"""

import json
import os
import time

from shared import write_result

PROMPTS = 256
SAMPLES = 4
ROUNDS = 3


def main() -> None:
    """Measure, print the result, and write it."""
    began = time.monotonic()
    import rloo_kit as rk

    rk.setup()
    import torch

    loading = time.monotonic() - began
    rounds = []
    for _ in range(ROUNDS):
        table = rk.evaluate_models(
            ["tiny-thinker"], num_prompts=PROMPTS, num_samples=SAMPLES, greedy=False,
            overrides=["trainer.max_completion_length=48"], batch_size=256, say=str,
        )  # fmt: skip
        rounds.append(table.rows[0].seconds)
    found = table.rows[0].evaluation
    result = {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "seconds": rounds,
        "libraries_seconds": loading,
        "tokens": found.mean_length * PROMPTS * SAMPLES,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "found": {name: str(found.estimate(name)) for name in found.rewards}
        | {f"pass@{k}": str(one) for k, one in found.pass_at.items()},
    }
    print(json.dumps(result, indent=1))
    write_result("evaluate_cpu", **result)


if __name__ == "__main__":
    main()
