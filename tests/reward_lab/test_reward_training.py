"""A reward model from pairs: what is read and refused; the folder scores as it did in training."""

import json
import math
import random
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from rloo_kit.rewards import RewardModel
from worked_thought import worked_thought

from rloo_kit.cli import main
from rloo_kit.data.tasks import arithmetic_prompt
from rloo_kit.errors import ConfigError, DataError, DivergedError, MemoryRanOutError, ModelError
from rloo_kit.reward_lab import reward_model
from rloo_kit.reward_lab.reward_model import read_pairs, split_pairs, train_reward_model
from rloo_kit.scoring.specs import load_rewards
from rloo_kit.training.supervised import make_trainer


def sums(num):
    """Pairs of which the better text carries and the worse one does not: two for each prompt."""
    rng = random.Random(1)
    rows = []
    while len(rows) < num:
        a = rng.randint(100, 999)
        b = rng.randint(100, 999)
        chosen, _ = worked_thought(a, b)
        rejected, _ = worked_thought(a, b, forgets=lambda: True)
        if chosen.count("+") == 5:
            # Carries twice.
            row = {"prompt": arithmetic_prompt(a, b), "chosen": chosen, "rejected": rejected}
            rows += [row, {**row, "chosen": f"{chosen} ", "rejected": f"{rejected} "}]
    return rows


ROWS = sums(80)
QUICK = {"held_out": 16, "max_steps": 12, "learning_rate": 2e-3, "max_length": 96}
SHORT = {**QUICK, "max_steps": 2, "held_out": 4}


def write_pairs(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train(folder, rows=ROWS, say=str, **settings):
    return train_reward_model(rows, output_dir=folder / "taste", say=say, **settings)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The result of a training on a file, and the lines that it printed."""
    folder = tmp_path_factory.mktemp("trained")
    lines = []
    return train(folder, write_pairs(folder / "pairs.jsonl", ROWS), lines.append, **QUICK), lines


def held_out_columns():
    """The held-out texts of ``trained``, the chosen ones first, as a reward is given them."""
    _, held = split_pairs(read_pairs(ROWS), QUICK["held_out"], 42)
    texts = [pair.chosen for pair in held] + [pair.rejected for pair in held]
    return {"prompts": [p for p, _ in texts], "completions": [c for _, c in texts]}


# --- pairs ---------------------------------------------------------------------------------------


FORMS = """
- prompt: Hello?
  chosen: [&good {role: assistant, content: Hello!}]
  rejected: [&bad {role: assistant, content: No.}]
- chosen: [&user {role: user, content: "Hello?"}, *good]
  rejected: [*user, *bad]
- prompt: Hello?
  chosen: [*user, *good]
  rejected: [*user, *bad]
- {prompt: [*user], chosen: Hello!, rejected: No.}
- {prompt: "Hello?", chosen: Hello!, rejected: No.}
"""


@pytest.mark.parametrize("row", yaml.safe_load(FORMS))
def test_a_conversation_is_read_in_every_form(row):
    (pair,) = read_pairs([row])
    user = [{"role": "user", "content": "Hello?"}]
    assert pair.chosen == (user, [{"role": "assistant", "content": "Hello!"}])
    assert pair.rejected == (user, [{"role": "assistant", "content": "No."}])


REMEDIES = {
    '{"prompt": "a", "chosen": "b"}': "rejected is None, must be text or a list",
    '{"chosen": [{"role": "x"}], "rejected": "b"}': "needs a `role`, which is text",
    '{"chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", '
    '"content": "c"}]}': "chosen must be a conversation that ends with",
    '{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "c"}]}': (
        "rejected must be a conversation"
    ),
}


@pytest.mark.parametrize(("row", "remedy"), REMEDIES.items())
def test_a_bad_pair_is_named_with_its_line_and_the_remedy(tmp_path, row, remedy):
    path = write_pairs(tmp_path / "pairs.jsonl", [ROWS[0], json.loads(row)])
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 2: .*{remedy}"):
        read_pairs(path)


@pytest.mark.parametrize(("held_out", "what"), [(0.001, "raise"), (10**6, "lower")])
def test_an_empty_split_is_refused(held_out, what):
    with pytest.raises(DataError, match=f"{what} it, or add pairs"):
        split_pairs(read_pairs(ROWS), held_out, 42)


@pytest.mark.parametrize(("held_out", "expected"), [(0.1, 8), (7, 6)])
def test_all_pairs_of_a_prompt_are_on_one_side(held_out, expected):
    pairs = read_pairs(ROWS)
    train, held = split_pairs(pairs, held_out, 42)
    assert len(held) == expected
    assert {p.group for p in train} & {p.group for p in held} == set()
    assert len(train) == len(pairs) - expected
    assert split_pairs(pairs, held_out, 42) == (train, held)
    assert split_pairs(pairs, held_out, 43) != (train, held)


# --- what training leaves ------------------------------------------------------------------------


def test_held_out_accuracy_rises_in_4_bit(trained):
    result, lines = trained
    assert result.accuracy_before < 0.8
    assert result.accuracy >= 0.9
    assert result.margin > 0
    assert (result.num_pairs, result.num_held_out) == (64, 16)
    assert "4-bit NF4" in lines[0]
    assert lines[1] == "64 pairs to train on, 16 held out"
    assert lines[-1].startswith("next: in a run file, rewards: [{name: reward_model, model: ")


def test_the_folder_holds_an_adapter_a_calibration_and_the_facts(trained):
    result, _ = trained
    names = {path.name for path in result.folder.iterdir()}
    assert {
        "adapter_config.json", "adapter_model.safetensors", "calibration.json",
        "reward_model.json", "tokenizer.json",
    } <= names  # fmt: skip
    assert not {name for name in names if name.endswith((".bin", ".pt", ".md"))}
    facts = json.loads((result.folder / "reward_model.json").read_text())
    wanted = {"base": "tiny-thinker", "accuracy": result.accuracy, "steps": 12}
    wanted |= {"load_in_4bit": True, "keep_thought": False, "max_length": 96}
    assert facts == facts | wanted
    assert not list(result.folder.parent.glob(".*"))


@pytest.mark.long
def test_a_base_that_is_4_bit_on_disk_keeps_its_score_head(packed_thinker, tmp_path):
    equal = {"prompt": "x", "chosen": "y", "rejected": "y"}  # left out
    result = train(tmp_path, [*ROWS, equal], model=str(packed_thinker), **SHORT)
    assert result.num_pairs + result.num_held_out == len(ROWS)
    reward = RewardModel(str(result.folder))
    first, second = reward(prompts=["x", "x"], completions=["a", "b c"])
    assert first != second
    kinds = {name: type(m).__name__ for name, m in reward._loaded.model.named_modules()}
    assert "4bit" not in kinds[next(name for name in kinds if name.endswith("score"))]
    assert "Linear4bit" in kinds.values()


def test_the_reward_gives_the_scores_that_training_computed(trained):
    result, _ = trained
    scores = RewardModel(str(result.folder), calibrated=False)(**held_out_columns())
    margins = [c - r for c, r in zip(scores[:16], scores[16:], strict=True)]
    assert sum(margin > 0 for margin in margins) / 16 == result.accuracy
    assert statistics.fmean(margins) == pytest.approx(result.margin, abs=1e-4)


def test_calibrated_scores_have_mean_0_and_standard_deviation_1(trained):
    result, _ = trained
    (reward,) = load_rewards([str(result.folder)])
    assert reward.name == "reward_model"
    scores = reward.func(**held_out_columns())
    assert statistics.fmean(scores) == pytest.approx(0, abs=1e-3)
    assert statistics.pstdev(scores) == pytest.approx(1, abs=1e-3)


# --- what is refused, and what is left then ------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"learning_rat": 1e-3}, "TRL refuses .*unexpected keyword argument 'learning_rat'"),
        ({"eval_strategy": "steps"}, "TRL refuses .*'eval_strategy'"),
        ({"lr_scheduler_type": "sideways"}, "TRL refuses the settings of the reward model"),
        ({"learning_rate": 0}, "learning_rate is 0, must be greater than 0"),
    ],
)
def test_a_bad_setting_is_refused_with_the_remedy(tmp_path, settings, remedy):
    with pytest.raises(ConfigError, match=remedy):
        train(tmp_path / "new", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_base_that_is_no_model_is_refused(tmp_path):
    for model in (tmp_path, write_pairs(tmp_path / "model.gguf", [])):
        with pytest.raises(ModelError, match=r"the base .* cannot be loaded"):
            train(tmp_path, model=model)


def test_scores_that_are_not_finite_are_one_sentence_and_leave_nothing(tmp_path, monkeypatch):
    what = "scores that are NaN or Inf, so nothing is saved"
    with pytest.raises(DivergedError, match=f"{what}: lower learning_rate"):
        train(tmp_path, **{**SHORT, "learning_rate": 1e36, "max_grad_norm": 1e9})
    monkeypatch.setattr(reward_model, "logits", lambda *_: [math.nan])
    with pytest.raises(DivergedError, match=f"{what}: name another base model"):
        train(tmp_path, **SHORT)
    assert list(tmp_path.iterdir()) == []


def test_a_training_keeps_its_result_if_another_one_takes_its_folder(tmp_path):
    def say(line):
        if "to train on" in line:
            (tmp_path / "taste" / "theirs").mkdir(parents=True)

    result = train(tmp_path, say=say, logging_steps=np.int64(1), **SHORT)  # JSON has no np.int64
    assert result.folder == tmp_path / "taste-2"
    facts = json.loads((result.folder / "reward_model.json").read_text())
    assert facts["settings"]["logging_steps"] == 1


@pytest.mark.long
def test_pairs_that_differ_in_the_thought_alone_ask_for_it(tmp_path):
    rows = [
        {"prompt": f"{n}?", "chosen": "a\n</think>\n\n1", "rejected": "b\n</think>\n\n1"}
        for n in range(4)
    ]
    with pytest.raises(
        DataError,
        match=r"chosen and rejected are the same in each of the 3 pairs.*set keep_thought",
    ):
        train(tmp_path, rows, held_out=1)
    assert list(tmp_path.iterdir()) == []


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_trains_in_float32_too_and_overwrites_nothing(trained, capsys, recwarn):
    first, _ = trained
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    settings = {**QUICK, "load_in_4bit": "false"}
    command = ["reward-model", "train", str(first.folder.parent / "pairs.jsonl")]
    command += ["--output-dir", str(first.folder)]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "32-bit" in printed
    accuracy, before_it = re.search(r"accuracy (\S+) \(before (\S+)\)", printed).groups()
    assert float(before_it) < 0.8
    assert float(accuracy) >= 0.9
    # PEFT would ask the hub for the vocabulary of a base that is known by its name alone.
    assert not [w for w in recwarn if "config file in tiny-thinker" in str(w.message)]
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before
    assert RewardModel(f"{first.folder}-2")(prompts=["x"], completions=["a"])


@pytest.mark.long
def test_the_command_ends_with_2_and_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl", ROWS)
    assert main(["reward-model", "train", "pairs.jsonl", "--model", "./none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rloo-kit: the base './none' of a reward model cannot be loaded")
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_out_of_memory_is_one_sentence_and_leaves_nothing(monkeypatch, tmp_path):
    import transformers

    def runs_out(self):
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(transformers.Trainer, "train", runs_out)
    with pytest.raises(MemoryRanOutError, match="lower per_device_train_batch_size"):
        train(tmp_path / "new", **SHORT)
    assert list(tmp_path.iterdir()) == []


def test_the_adapter_stays_on_the_device_to_which_the_trainer_moves_the_model():
    model = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    model.peft_config = {}

    def move(model, args, callbacks):  # as transformers does if the model is not in 4 bit
        return SimpleNamespace(model=model.to("meta"), remove_callback=str)

    trainer = make_trainer(move, str, (), model=model, args=SimpleNamespace(bf16=True))
    assert {(p.device.type, p.dtype) for p in trainer.model.parameters()} == {
        ("meta", torch.float32)
    }
