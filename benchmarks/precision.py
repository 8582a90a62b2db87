"""Log-probabilities of sampler against learner, in bf16 and in float16, on a CPU.

    python scripts/fetch_smollm2.py
    python benchmarks/precision.py     # a minute and a half

The result is the mean of |log p(sampler) - log p(learner)| over 512 sampled tokens, in nats. This
is the number that ``rloo-kit calibrate --precision`` compares. Sampler and learner use
transformers.
"""

from shared import write_result

import rloo_kit as rk

rk.setup("transformers")

from rloo_kit.job import PreparedJob, read_config
from rloo_kit.runs.precision import PRECISIONS, mismatch

found = {}
for name in ("quickstart", "smollm2"):
    config, base = read_config(name, ["model.backend=transformers"])
    rows = [*PreparedJob(config, base).splits[0].select(range(8))]  # without long prompts
    found[name] = {one: round(mismatch(config, base, rows, one), 6) for one in PRECISIONS}
    print(name, found[name], flush=True)
write_result("precision_cpu", **found)
