"""``rloo-kit hand-over``: what verl gets, read back without verl."""

import json
import subprocess

import numpy
import pyarrow.parquet
import pytest
import torch
import yaml
from fresh_python import run_python
from PIL import Image

from rloo_kit.cli import main
from rloo_kit.config.run_file import RunConfig
from rloo_kit.errors import ConfigError, RewardLoadError
from rloo_kit.export.hand_over import hand_over
from rloo_kit.export.verl_settings import ASSETS
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.rloo.batching import TokenRows
from rloo_kit.rloo.rollout import ScoredBatch
from rloo_kit.sampling.completer import as_completions
from rloo_kit.scoring.contract import call_reward, reward_columns

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
SCORE = """
import json, sys
import pyarrow.parquet
sys.path.insert(0, sys.argv[1])
import reward
rows = pyarrow.parquet.read_table(f"{sys.argv[1]}/train.parquet").to_pylist()
found = []
for one in json.load(sys.stdin):
    row = rows[one["row"]]
    info = {**row["extra_info"], "completion_ids": one["ids"], "num_turns": 2}
    found.append(reward.compute_score(
        data_source=row["data_source"], solution_str=one["text"],
        ground_truth=row["reward_model"]["ground_truth"], extra_info=info,
    ))
assert not {"trl", "peft", "unsloth", "verl"} & set(sys.modules)
print(json.dumps(found))
"""


def score_by_kit(run_file):
    """Return NUM completions of training prompts, with the scores that a training gives them."""
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
    rewards = torch.tensor(numpy.array(found, numpy.float32).T)
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
            "scores": {
                "score": scores[at].item(),
                **dict(zip(names, rewards[at].nan_to_num(0.0).tolist(), strict=True)),
            },
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


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    """A run file with a reward of its own beside it."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "mine.py").write_text(OWN)
    (folder / "run.yaml").write_text(RUN)
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def folder(run_file):
    """The hand-over of a run, moved, its reward's file gone."""
    made = hand_over(run_file, output=run_file.parent / "made", say=lambda _: None)
    return made.rename(run_file.parent / "moved elsewhere")


def settings_of(tmp_path, *overrides, source="quickstart"):
    """The settings of verl that a run becomes, and the lines of its table."""
    made = hand_over(source, output=tmp_path / "made", overrides=overrides, say=lambda _: None)
    text = (made / "HANDOVER.md").read_text()
    return yaml.safe_load((made / "verl.yaml").read_text()), text


def test_a_share_of_the_run_is_saved_as_often_by_verl(tmp_path):
    verl, _ = settings_of(tmp_path, "trainer.save_steps=0.25")  # of 40 steps
    assert verl["trainer"]["save_freq"] == 10


def test_prompts_read_back_as_verl_reads_them(folder, run_file):
    train, held_out = PreparedJob(*read_config(run_file, [])).splits
    for name, rows in (("train", train), ("held_out", held_out)):
        table = pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
        assert [row["extra_info"].pop("columns") for row in table] == list(rows)
        assert table[3] == {
            "data_source": "arithmetic",
            "prompt": rows[3]["prompt"],
            "reward_model": {"style": "rule", "ground_truth": rows[3]["answer"]},
            "extra_info": {"index": 3, "split": name},
        }


@pytest.mark.long
def test_reward_file_gives_the_scores_of_a_training(folder, run_file):
    expected = score_by_kit(run_file)
    given = json.loads(run_python(SCORE, folder, input=json.dumps(expected), cwd="/"))
    assert len({one["score"] for one in given}) >= 8
    assert given == [pytest.approx(one["scores"], abs=1e-6) for one in expected]


def test_every_setting_of_the_run_file_is_in_the_table(folder, run_file):
    text = (folder / "HANDOVER.md").read_text()
    carried, lost = text.split("## Settings that are not carried over")
    content = yaml.safe_load(run_file.read_text())
    names = {
        f"{section}.{name}" for section in ("model", "data", "trainer") for name in content[section]
    }
    names -= {"data.prompts"}  # it is the default
    assert [name for name in sorted({*names, "rewards"}) if f"`{name}: " not in text] == []
    assert "`trainer.thinking_budget: 20` | verl cannot limit" in lost
    assert "`trainer.repetition_penalty: 1.1`" in lost
    assert "`model.load_in_4bit: True`" in lost
    assert "`algorithm.kl_ctrl.kl_coef: 0.02`" in carried
    assert "@" not in text


def test_the_table_knows_every_setting_of_model_data_and_thoughts():
    table = yaml.safe_load((ASSETS / "settings.yaml").read_text())
    known = {
        *table["in_files"],
        *table["lost"],
        *(n for one in table["carried"] for n in one["run"]),
    }
    content = RunConfig().as_dict()
    names = {f"{part}.{name}" for part in ("model", "data", "thinking") for name in content[part]}
    assert names - known == set()


def test_settings_become_those_of_verl(folder):
    verl = yaml.safe_load((folder / "verl.yaml").read_text())
    actor = verl["actor_rollout_ref"]["actor"]
    rollout = verl["actor_rollout_ref"]["rollout"]
    assert verl["algorithm"]["adv_estimator"] == "rloo"
    assert verl["algorithm"]["use_kl_in_reward"] is True
    assert verl["algorithm"]["filter_groups"] == {"enable": True, "metric": "reward"}
    assert (actor["clip_ratio_low"], actor["clip_ratio_high"]) == (0.2, 0.28)
    assert rollout["n"] == 4
    assert verl["data"]["train_batch_size"] == actor["ppo_mini_batch_size"] == 8
    assert verl["trainer"]["total_training_steps"] == 8
    assert verl["trainer"]["test_freq"] == 4
    assert verl["data"]["max_prompt_length"] + verl["data"]["max_response_length"] == 256


def test_steps_of_verl_are_generation_batches(tmp_path):
    verl, text = settings_of(
        tmp_path,
        "trainer.per_device_train_batch_size=16",
        "trainer.gradient_accumulation_steps=2",
        "trainer.steps_per_generation=4",
        "trainer.num_iterations=2",
        "trainer.max_steps=30",
        "trainer.save_steps=8",
        "trainer.max_grad_norm=0",
        "trainer.beta=0",
        "data.held_out=0",
    )
    assert verl["data"]["train_batch_size"] == 8
    assert verl["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] == 4
    assert verl["actor_rollout_ref"]["actor"]["ppo_epochs"] == 2
    assert verl["actor_rollout_ref"]["actor"]["optim"]["clip_grad"] == 1e9
    assert verl["trainer"]["total_training_steps"] == 8  # of 4 optimizer steps, for 30
    assert verl["trainer"]["save_freq"] == 2
    assert verl["trainer"]["val_before_train"] is False
    assert verl["trainer"]["test_freq"] == -1
    assert verl["algorithm"]["use_kl_in_reward"] is False
    assert "optimizer steps of the kit in a step of verl: 4" in text
    assert not (tmp_path / "made/held_out.parquet").exists()
    assert (
        "/train.parquet'\" \\\n  data.val_files=\"'$HERE/train.parquet'"
        in (tmp_path / "made/run.sh").read_text()
    )


def test_settings_of_vllm_are_carried_and_not_lost(tmp_path):
    verl, text = settings_of(tmp_path, "vllm.enforce_eager=true")
    engine = verl["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert engine == {"enforce_eager": True}
    assert "enforce_eager" not in text.split("## Settings that are not carried over")[1]


def test_secrets_are_masked_and_the_script_is_bash(tmp_path):
    key = "sk-" + "9f3" * 12
    (tmp_path / "own.py").write_text("def own(completions, api_key='', **_): return [1.0]")
    content = {"rewards": ["accuracy", {"name": "own.py:own", "api_key": key}]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(content))
    settings_of(tmp_path, source=tmp_path / "run.yaml")
    files = [one for one in (tmp_path / "made").rglob("*") if one.is_file()]
    assert len(files) > 8
    assert not [one for one in files if key.encode() in one.read_bytes()]
    subprocess.run(["bash", "-n", tmp_path / "made/run.sh"], check=True)


def test_prompts_with_images_are_refused_and_a_failure_leaves_no_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (28, 28)).save("image.png")
    (tmp_path / "p.jsonl").write_text('{"prompt": "what?", "answer": "1", "image": "image.png"}')
    (tmp_path / "run.yaml").write_text("data: {prompts: p.jsonl, held_out: 0}")
    words = ["--to", "verl", "--output", "made"]
    assert main(["hand-over", "run.yaml", *words]) == 2
    assert "but these have images" in capsys.readouterr().err

    def fail(*_):
        raise RewardLoadError("no")

    monkeypatch.setattr("rloo_kit.export.hand_over._write_rewards", fail)
    assert main(["hand-over", "quickstart", *words]) == 2
    assert {one.name for one in tmp_path.iterdir()} == {"image.png", "p.jsonl", "run.yaml"}


def test_a_folder_that_cannot_be_created_is_refused(run_file):
    with pytest.raises(ConfigError, match=r"cannot be written .*: give another folder"):
        hand_over(run_file, output=run_file / "made")


WRONG = {
    "--to trl": "rloo-kit: --to 'trl' is unknown: give verl",
    "--to verl --set data.chat=false": "rloo-kit: verl needs chat prompts, but these are plain "
    "texts: set data.chat to true",
    "--to verl --set tools=[calculator]": "rloo-kit: verl has its own settings for tools, which "
    "the kit does not write: train with rloo-kit, or leave tools and environment out",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_one_sentence(words, tmp_path, capsys):
    made = tmp_path / "made"
    assert main(["hand-over", "quickstart", "--output", str(made), *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == WRONG[words]
    assert not made.exists()
