"""Training with tools: parity without calls, the gradient with calls, run files, resume."""

import json
import random

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

import rloo_kit as rk
from rloo_kit.errors import ConfigError
from rloo_kit.tools.calculator import calculator

pytestmark = pytest.mark.long


class Seen(TrainerCallback):
    """The records of every batch, and what was sampled."""

    def __init__(self):
        self.records = []
        self.sampled = []
        self.masks = []

    def on_completions(self, args, state, control, records, rollout, **_):
        self.records.append(records)
        self.sampled.append(rollout.sampled)
        self.masks.append(rollout.completion_mask)


def test_tools_that_are_never_called_change_nothing(tmp_path, trainer_of):
    found = []
    for tools in ((), (calculator,)):
        seen = Seen()
        # tiny-thinker has never seen a call
        trainer = trainer_of(tmp_path, "tiny-thinker", "arithmetic", tools, [seen])
        trainer.train()
        ids = [sampled.tokens.completion_ids for sampled in seen.sampled]
        losses = [row.get("loss") for row in trainer.state.log_history]
        found.append((ids, losses, trainer.trained_parameters()))
    (*numbers, weights), (*other_numbers, other_weights) = found
    assert numbers == other_numbers
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def log_probs_of(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).squeeze(1)


class ByHand(TrainerCallback):
    """The gradient of RLOO in plain torch, one trajectory at a time; only sampled tokens count."""

    def __init__(self, beta):
        self.beta = beta
        self.errors = []
        self.calls = 0

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        sampled = self.trainer.rloo.rollout.sampled
        tokens = sampled.tokens
        rows = [*zip(tokens.prompt_ids, tokens.completion_ids, tokens.is_sampled, strict=True)]
        self.calls += sum(not all(mask) for mask in tokens.is_sampled)

        def sums_of_log_probs():
            return torch.stack(
                [(log_probs_of(model, *ids) * torch.tensor(mask)).sum() for *ids, mask in rows]
            )

        own = sums_of_log_probs()
        with torch.no_grad(), model.disable_adapter():
            kl = own - sums_of_log_probs()
        grouped = (sampled.scores - self.beta * kl).view(-1, args.num_generations)
        others = (grouped.sum(1, keepdim=True) - grouped) / (args.num_generations - 1)
        advantages = (grouped - others).flatten()
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradient = torch.autograd.grad(-(advantages * own).mean(), parameters)
        by_hand = torch.cat([one.flatten() for one in gradient])
        kit = torch.cat([p.grad.flatten() for p in parameters])
        self.errors.append(float((kit - by_hand).norm() / by_hand.norm()))


@pytest.mark.parametrize(
    ("beta", "checkpointing"), [(0.0, False), (0.05, True)], ids=["shared prompts", "each prompt"]
)
def test_the_gradient_of_trajectories_is_that_of_a_plain_loop(
    tmp_path, trainer_of, beta, checkpointing
):
    by_hand = ByHand(beta)
    trainer = by_hand.trainer = trainer_of(
        tmp_path, tools=[calculator], callbacks=[by_hand], beta=beta,
        gradient_checkpointing=checkpointing,
    )  # fmt: skip
    trainer.train()
    assert by_hand.calls > 3
    assert len(by_hand.errors) == 2
    assert max(by_hand.errors) < 1e-5


def test_results_do_not_count_as_completion(tmp_path, trainer_of):
    seen = Seen()
    trainer = trainer_of(tmp_path, tools=[calculator], callbacks=[seen], max_steps=1)
    trainer.train()
    is_sampled = seen.sampled[0].tokens.is_sampled
    called = [row for row, mask in enumerate(is_sampled) if not all(mask)]
    assert called
    for row in called:
        record = seen.records[0][row]
        assert record["tokens"] == sum(is_sampled[row])
        assert not seen.masks[0][row].all()
        assert [one["role"] for one in record["completion"]][:2] == ["assistant", "tool"]
    lengths = list(map(sum, is_sampled))
    (log,) = [row for row in trainer.state.log_history if "step_time" in row]
    assert log["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert log["tools/call_frequency"] > 0
    assert log["tools/failure_frequency"] == 0


class Silent:
    """Without a reward."""

    def reset(self, **row):
        pass


def test_a_run_file_trains_with_tools_and_resumes(tmp_path, capsys):
    (tmp_path / "my_tools.py").write_text(
        "def calculator(expression: str) -> str:\n"
        '    """Compute.\n\n    Args:\n        expression: What.\n    """\n'
        "    return str(eval(expression))\n"
    )
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64, held_out: 0}\n"
        "tools: [my_tools.py:calculator]\n"
        "rewards: [accuracy, {name: tool_use, cost: 0.1}]\n"
        "trainer: {max_steps: 2, save_steps: 1, per_device_train_batch_size: 16,\n"
        "  num_generations: 4, max_completion_length: 192, learning_rate: 1.0e-3,\n"
        "  lr_scheduler_type: constant}\n"
        f"output_dir: {tmp_path}/out\n"
    )
    whole = rk.train(run)
    rk.train(run, overrides=[f"output_dir={tmp_path}/cut", "trainer.max_steps=1"])
    again = rk.train(tmp_path / "cut", resume=True, overrides=["trainer.max_steps=2"])
    adapter = "adapter/adapter_model.safetensors"
    assert (whole.folder / adapter).read_bytes() == (again.folder / adapter).read_bytes()
    lines = (whole.folder / "completions.jsonl").read_text().splitlines()
    assert 3 in {len(json.loads(line)["completion"]) for line in lines}
    assert "calculator({" in (whole.folder / "report.html").read_text()


def test_an_environment_of_a_run_file_scores_held_out_prompts_too(tmp_path):
    (tmp_path / "game.py").write_text(
        "class Adder:\n"
        "    resets = 0\n\n"
        "    def reset(self, answer, **row):\n"
        "        self.resets += 1\n"
        "        self.right = answer\n        self.calls = 0\n\n"
        "    def calculator(self, expression: str) -> str:\n"
        '        """Compute.\n\n        Args:\n            expression: What.\n        """\n'
        "        self.calls += 1\n        return self.right\n\n"
        "    def get_reward(self):\n        return float(self.calls)\n\n\n"
        "def calls(completions, environments, completion_turns, **_):\n"
        "    return [0.5 * one.calls for one in environments]\n\n\n"
        "def resets(completions, environments, **_):\n"
        "    return [float(one.resets) for one in environments]\n"
    )
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64, held_out: 16,\n"
        "  held_out_rewards: [game.py:resets]}\n"
        "environment: game.py:Adder\n"
        "rewards: [game.py:calls]\n"
        "trainer: {max_steps: 1, per_device_train_batch_size: 16, num_generations: 4,\n"
        "  max_completion_length: 192, reward_weights: [2.0]}\n"
        f"output_dir: {tmp_path}/out\n"
    )
    result = rk.train(run)
    assert 0 < result.before.rewards["Adder"] < 1
    assert result.before.rewards["calls"] == pytest.approx(0.5 * result.before.rewards["Adder"])
    lines = (result.folder / "completions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert all(row["rewards"]["Adder"] == 2 * row["rewards"]["calls"] for row in rows)
    assert any(row["rewards"]["Adder"] for row in rows)
    assert all(row["score"] == pytest.approx(2 * row["rewards"]["Adder"]) for row in rows)
    table = rk.evaluate_models([result.folder], num_prompts=4, num_samples=0)
    assert "Adder" in str(table)
    # the base and the run play in new environments
    assert [row.evaluation.rewards["resets"] for row in table.rows] == [1.0, 1.0]


class Sum:
    """Makes its own sums, by the seed of the row."""

    def reset(self, seed, **row):
        numbers = random.Random(seed)
        self.numbers = numbers.randint(100, 999), numbers.randint(100, 999)
        return "What is {} + {}?".format(*self.numbers)

    def calculator(self, expression: str) -> str:
        """Compute.

        Args:
            expression: What.
        """
        return str(sum(self.numbers))

    def get_reward(self):
        return 1.0


def shortest(completions, **_):
    return [-float(len(turns[-1]["content"])) for turns in completions]


OWN_PROMPTS = {"prompts": None, "reward_funcs": [shortest], "environment_factory": Sum}


def test_an_environment_can_own_its_prompts(tmp_path, trainer_of):
    seen = Seen()
    trainer = trainer_of(tmp_path, callbacks=[seen], shuffle_dataset=False, **OWN_PROMPTS)
    assert {tool.__name__ for tool in trainer.tools} == {"calculator"}
    trainer.train()
    texts = [prompt[-1]["content"] for sampled in seen.sampled for prompt in sampled.prompts]
    assert len(trainer.environments) == 16
    # 2 steps of 4 groups: all 4 completions of a prompt play the same game, each prompt another
    assert texts == [text for text in texts[::4] for _ in range(4)]
    assert len(set(texts)) == 8
    several = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3}
    trainer = trainer_of(tmp_path, **OWN_PROMPTS | several)
    assert len(trainer.train_dataset) == 24  # two batches of four prompts in a step
    rows = Dataset.from_dict({"seed": range(8)})  # without prompts
    trainer = trainer_of(tmp_path, dataset=rows, max_steps=1, **OWN_PROMPTS)
    trainer.train()
    assert all(one.numbers for one in trainer.environments)


WITH_A_TOOL = {"tools": [calculator]}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (OWN_PROMPTS | {"max_steps": -1}, "max_steps limits the length"),
        (
            OWN_PROMPTS | {"environment_factory": {"a": Sum}},
            "several environments require a `train_dataset`",
        ),
        ({"max_tool_calling_iterations": 3}, "no effect without tools"),
        ({"reward_funcs": None, "environment_factory": Silent}, "there is no reward"),
        (
            WITH_A_TOOL | {"chat_template_kwargs": {"tools": [{"a": 1}]}},
            "contains tools, but the kit adds the",
        ),
        (WITH_A_TOOL | {"eval_dataset": Dataset.from_list([{"prompt": "1"}])}, "eval_dataset"),
        (WITH_A_TOOL | {"partial_rollouts": True}, "partial_rollouts"),
        (WITH_A_TOOL | {"step": "trl"}, "need the kit's own step"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, trainer_of, settings, says):
    with pytest.raises(ConfigError, match=says):
        trainer_of(tmp_path, **settings)
