"""Check the folder of `rloo-kit hand-over` where verl is installed; by hand, minutes on a CPU.

    uv venv /elsewhere/verl && uv pip install --python /elsewhere/verl/bin/python verl==0.9.1 torch
    uv pip install --python /elsewhere/verl/bin/python --no-deps .
    .venv/bin/python tests/scripts/check_hand_over.py /elsewhere/verl/bin/python

The kit writes a folder and scores 200 completions. In verl's environment, run.sh composes the
configuration, verl's own checks pass, its data set reads the prompts, and its reward manager gives
the same scores.
"""

import asyncio
import copy
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

NUM = 200
OWN = '''
def mentions(completions, prompts, answer, **_):
    """1 where the right answer stands anywhere, None for prompts of an even length."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        None if len(prompt[-1]["content"]) % 2 == 0 else float(right in text)
        for text, prompt, right in zip(texts, prompts, answer, strict=True)
    ]
'''
RUN = """
model: {name: tiny-thinker, max_seq_length: 256}
data:
  prompts: arithmetic
  num_prompts: 64
  held_out: 8
  held_out_every: 4
  held_out_rewards: [length_band]
rewards:
  - accuracy
  - {name: thinking, weight: 0.25, long: 12}
  - {name: "mine.py:mentions", weight: 0.5, only_if: {name: thinking_closed_once, otherwise: -0.5}}
trainer:
  max_steps: 8
  per_device_train_batch_size: 16
  gradient_accumulation_steps: 2
  num_generations: 4
  max_completion_length: 24
  missing_eos_penalty: 0.5
  reward_clip_range: [-1, 1.25]
  beta: 0.02
  thinking_budget: 20
  dynamic_sampling: true
  epsilon_high: 0.28
  repetition_penalty: 1.1
"""


def write_run(folder):
    """Write a run file with a reward of its own beside it; return its path."""
    (folder / "mine.py").write_text(OWN)
    (folder / "run.yaml").write_text(RUN)
    return folder / "run.yaml"


def score_by_kit(run_file):
    """Return NUM completions of training prompts, with the scores that a training gives them."""
    import torch

    from rloo_kit.job import PreparedJob, read_config
    from rloo_kit.rloo.batching import TokenRows
    from rloo_kit.rloo.rollout import ScoredBatch
    from rloo_kit.sampling.completer import as_completions
    from rloo_kit.scoring.contract import call_reward, reward_columns

    job = PreparedJob(*read_config(run_file, []), say=lambda _: None)
    tokenizer = job.tokenizer
    longest = job.args.max_completion_length
    number = len(job.splits[0])
    rows = [job.splits[0][at % number] for at in range(NUM)]
    texts = [_text(at, row["answer"]) for at, row in enumerate(rows)]
    ids = [tokenizer(text)["input_ids"][:longest] for text in texts]
    ids = [one if len(one) == longest else [*one, tokenizer.eos_token_id] for one in ids]
    prompts = [row["prompt"] for row in rows]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    completions = as_completions(prompts, texts)
    columns = reward_columns(rows, completions, ids)
    found = [call_reward(one.func, columns) for one in job.rewards]
    rewards = torch.tensor(
        [[torch.nan if score is None else score for score in one] for one in found]
    ).T
    weights = torch.tensor([one.weight for one in job.rewards])
    batch = ScoredBatch(
        prompts=prompts,
        completions=completions,
        tokens=TokenRows([[0]] * NUM, ids),
        ended=[one[-1] == tokenizer.eos_token_id for one in ids],
        rewards=rewards,
        scores=(rewards * weights).nansum(dim=1),
    )
    scores, _ = batch.shaped_scores(job.args.shaping, 4)
    names = [one.name for one in job.rewards]
    return [
        {
            "row": at % number,
            "text": texts[at],
            "ids": ids[at],
            "score": scores[at].item(),
            "rewards": dict(zip(names, rewards[at].nan_to_num(0.0).tolist(), strict=True)),
        }
        for at in range(NUM)
    ]


def _text(at, answer):
    """Return a completion: right or wrong, with a thought of several lengths, or cut off."""
    said = answer if at % 3 else "17"
    kinds = (
        f"{'1+' * (at % 7)}2</think>{said}",
        f"</think>{said}",
        f"4+5={said}",
        f"{'12+' * 12}</think>{said}",
        f"1</think></think>{said}",
    )
    return kinds[at % len(kinds)]


def differences(expected, given):
    """Return the largest difference of a score, and of a single reward."""
    pairs = list(zip(expected, given, strict=True))
    scores = [abs(want["score"] - got["score"]) for want, got in pairs]
    each = [abs(w["rewards"][n] - g[n]) for w, g in pairs for n in w["rewards"]]
    return max(scores), max(each)


# --- in verl's environment ------------------------------------------------------------------------


def check_inside(folder):
    """Check a folder by verl itself; print what was seen."""
    shown = subprocess.run(
        ["bash", folder / "run.sh", "--cfg", "job", "--resolve"],
        env={**os.environ, "PYTHON": sys.executable, "GPUS": "2"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr[-3000:]
    from omegaconf import OmegaConf

    config = OmegaConf.create(shown.stdout)
    print(f"run.sh: composed, {len(shown.stdout.splitlines())} lines")
    _check_config(config)
    expected = [json.loads(line) for line in (folder / "scored.jsonl").read_text().splitlines()]
    given = _score(config, expected)
    apart = differences(expected, given)
    different = len({round(one["score"], 4) for one in expected})
    print(f"{len(given)} scores ({different} different ones): largest difference {apart[0]:.2e}, ")
    print(f"of a single reward {apart[1]:.2e}")
    assert max(apart) < 1e-5


def _check_config(config):
    """Run what main_ppo checks, and make the classes that its workers make of the settings."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    assert need_reference_policy(config)
    assert not need_critic(config)
    checked = config
    rank = config.actor_rollout_ref.model.lora_rank
    if find_spec("vllm") is None:  # the last check asks vLLM for its LoRA ranks
        checked = copy.deepcopy(config)
        checked.actor_rollout_ref.model.lora_rank = 0
        assert rank in (1, 8, 16, 32, 64, 128, 256, 320, 512)
    validate_config(checked, use_reference_policy=True, use_critic=False)
    of_policy = config.actor_rollout_ref
    for part in (of_policy.actor, of_policy.rollout, of_policy.model):
        omega_conf_to_dataclass(part)
    get_adv_estimator_fn(omega_conf_to_dataclass(config.algorithm).adv_estimator)


def _score(config, expected):
    """Return what verl's reward manager says of the completions, on the rows of its data set."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils import hf_tokenizer

    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.tokenizer_path)
    prompts = create_rl_dataset(config.data.train_files, config.data, tokenizer, None)
    held_out = create_rl_dataset(
        config.data.val_files, config.data, tokenizer, None, is_train=False
    )
    print(f"data: {len(prompts)} prompts, {len(held_out)} held out")
    width = config.data.max_response_length

    async def score(manager, row, ids):
        responses = torch.tensor([[*ids, *[0] * (width - len(ids))]])
        mask = torch.tensor([[1, *[1] * len(ids), *[0] * (width - len(ids))]])
        batch = TensorDict({"responses": responses, "attention_mask": mask}, batch_size=1)
        others = {key: np.array([row[key]], dtype=object) for key in
                  ("data_source", "reward_model", "extra_info")}  # fmt: skip
        found = await manager.run_single(DataProto(batch=batch, non_tensor_batch=others))
        info = found["reward_extra_info"]
        assert info["score"] == found["reward_score"]
        return info

    async def every():
        manager = load_reward_manager(config, tokenizer)  # it keeps the running loop
        print(f"reward manager: {type(manager).__name__}")
        await score(manager, held_out[0], expected[0]["ids"])
        return await asyncio.gather(
            *(score(manager, prompts[one["row"]], one["ids"]) for one in expected)
        )

    return asyncio.run(every())


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        check_inside(Path(sys.argv[2]))
        sys.exit()
    from rloo_kit.export.hand_over import hand_over

    with tempfile.TemporaryDirectory() as temporary:
        run_file = write_run(Path(temporary))
        made = hand_over(run_file, output=Path(temporary) / "handed over")
        lines = (json.dumps(one) for one in score_by_kit(run_file))
        (made / "scored.jsonl").write_text("\n".join(lines))
        moved = made.rename(made.with_name("moved elsewhere"))
        sys.exit(
            subprocess.run(
                [sys.argv[1], __file__, "--inside", moved], cwd=temporary, check=False
            ).returncode
        )
