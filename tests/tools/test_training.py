"""Training with tools: parity without calls, the gradient with calls, run files, resume."""

import contextlib
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
    """The completions of every batch."""

    def __init__(self):
        self.ids = []

    def on_completions(self, args, state, control, rollout, **_):
        self.ids.append(rollout.sampled.tokens.completion_ids)


def test_tools_that_are_never_called_change_nothing(tmp_path, trainer_of):
    found = []
    for tools in ((), (calculator,)):
        seen = Seen()
        # tiny-thinker has never seen a call
        trainer = trainer_of(tmp_path, "tiny-thinker", "arithmetic", tools, [seen])
        trainer.train()
        weights = {n: p.detach().clone() for n, p in trainer.trained_parameters().items()}
        found.append((seen.ids, weights, [row.get("loss") for row in trainer.state.log_history]))
    (ids, weights, losses), (other_ids, other_weights, other_losses) = found
    assert ids == other_ids
    assert losses == other_losses
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
        rollout = self.trainer.rloo.rollout
        parameters = [p for p in model.parameters() if p.requires_grad]
        found = [p.grad.clone() for p in parameters]
        tokens = rollout.sampled.tokens
        masks = [torch.tensor(mask) for mask in tokens.is_sampled]
        self.calls += sum(not all(mask.tolist()) for mask in masks)
        pairs = [*zip(tokens.prompt_ids, tokens.completion_ids, masks, strict=True)]
        rewards = rollout.sampled.scores.clone()
        with torch.no_grad():
            for row, (prompt, ids, mask) in enumerate(pairs):
                own = log_probs_of(model, prompt, ids)
                with model.disable_adapter():
                    kl = (own - log_probs_of(model, prompt, ids)) * mask
                rewards[row] -= self.beta * kl.sum()
        grouped = rewards.view(-1, args.num_generations)
        others = (grouped.sum(1, keepdim=True) - grouped) / (args.num_generations - 1)
        advantages = (grouped - others).view(-1)
        for parameter in parameters:
            parameter.grad = None
        for advantage, (prompt, ids, mask) in zip(advantages, pairs, strict=True):
            own = log_probs_of(model, prompt, ids)
            (-advantage * (own * mask).sum() / len(pairs)).backward()
        by_hand = torch.cat([p.grad.flatten() for p in parameters])
        kit = torch.cat([grad.flatten() for grad in found])
        self.errors.append(float((kit - by_hand).norm() / by_hand.norm()))
        for parameter, grad in zip(parameters, found, strict=True):
            parameter.grad = grad


@pytest.mark.parametrize("checkpointing", [False, True], ids=["shared prompts", "each prompt"])
@pytest.mark.parametrize("beta", [0.0, 0.05])
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
    seen = []

    class Take(TrainerCallback):
        def on_completions(self, args, state, control, records, rollout, **_):
            seen.append((records, rollout))

    trainer = trainer_of(tmp_path, tools=[calculator], callbacks=[Take()], max_steps=1)
    trainer.train()
    ((records, rollout),) = seen
    tokens = rollout.sampled.tokens
    called = [row for row, mask in enumerate(tokens.is_sampled) if not all(mask)]
    assert called
    for row in called:
        assert records[row]["tokens"] == sum(tokens.is_sampled[row])
        assert not rollout.completion_mask[row].all()
        names = [one["role"] for one in records[row]["completion"]]
        assert names[:2] == ["assistant", "tool"]
    lengths = list(map(sum, tokens.is_sampled))
    (log,) = [row for row in trainer.state.log_history if "step_time" in row]
    assert log["completions/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert log["tools/call_frequency"] > 0
    assert log["tools/failure_frequency"] == 0


class Adder:
    """The calculator as an environment."""

    def reset(self, answer, **row):
        self.answer = answer
        self.calls = 0

    def calculator(self, expression: str) -> str:
        """Compute an arithmetic expression exactly.

        Args:
            expression: Whole numbers, + - * / and brackets.
        """
        self.calls += 1
        return calculator(expression)

    def get_reward(self):
        return -0.1 * self.calls


class Silent:
    """Without a reward."""

    def reset(self, **row):
        pass


def test_a_tool_and_the_same_tool_of_an_environment_train_alike(tmp_path, trainer_of):
    found = []
    for how in ({"tools": [calculator]}, {"environment_factory": Adder}):
        reward = ["accuracy"] if "environment_factory" in how else None
        reward = reward or ["accuracy", {"name": "tool_use", "called": 0, "cost": 0.1}]
        trainer = trainer_of(tmp_path, reward_funcs=reward, **how)
        trainer.train()
        found.append({n: p.detach().clone() for n, p in trainer.trained_parameters().items()})
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


def test_a_run_file_trains_with_tools_and_resumes(tmp_path, capsys):
    (tmp_path / "my_tools.py").write_text(
        "def calculator(expression: str) -> str:\n"
        '    """Compute.\n\n    Args:\n        expression: What.\n    """\n'
        "    return str(eval(expression))\n"
    )
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64, held_out: 16}\n"
        "tools: [my_tools.py:calculator]\n"
        "rewards: [accuracy, {name: tool_use, cost: 0.1}]\n"
        "trainer: {max_steps: 4, save_steps: 2, per_device_train_batch_size: 16,\n"
        "  num_generations: 4, max_completion_length: 192, learning_rate: 1.0e-3,\n"
        "  lr_scheduler_type: constant}\n"
        f"output_dir: {tmp_path}/out\n"
    )
    whole = rk.train(run)
    with contextlib.suppress(KeyboardInterrupt):
        rk.train(run, overrides=[f"output_dir={tmp_path}/cut", "trainer.max_steps=2"])
    rk.train(tmp_path / "cut", resume=True, overrides=["trainer.max_steps=4"])

    def adapter_of(folder):
        return (folder / "adapter" / "adapter_model.safetensors").read_bytes()

    assert adapter_of(tmp_path / "out") == adapter_of(tmp_path / "cut")
    lines = (whole.folder / "completions.jsonl").read_text().splitlines()
    roles = {len(json.loads(line)["completion"]) for line in lines}
    assert 3 in roles
    page = (whole.folder / "report.html").read_text()
    assert "calculator({" in page


def test_an_environment_of_a_run_file_scores_held_out_prompts_too(tmp_path):
    (tmp_path / "game.py").write_text(
        "class Adder:\n"
        "    def reset(self, answer, **row):\n"
        "        self.right = answer\n        self.calls = 0\n\n"
        "    def calculator(self, expression: str) -> str:\n"
        '        """Compute.\n\n        Args:\n            expression: What.\n        """\n'
        "        self.calls += 1\n        return self.right\n\n"
        "    def get_reward(self):\n        return float(self.calls)\n\n\n"
        "def calls(completions, environments, **_):\n"
        "    return [0.5 * one.calls for one in environments]\n"
    )
    run = tmp_path / "run.yaml"
    run.write_text(
        "model: {name: tiny-caller, max_seq_length: 512}\n"
        "data: {prompts: sums, num_prompts: 64, held_out: 32}\n"
        "environment: game.py:Adder\n"
        "rewards: [game.py:calls]\n"
        "trainer: {max_steps: 2, per_device_train_batch_size: 16, num_generations: 4,\n"
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
    table = rk.evaluate_models([result.folder], num_prompts=8)
    assert "Adder" in str(table)


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


def test_an_environment_can_own_its_prompts(tmp_path, trainer_of):
    seen = []

    class Take(TrainerCallback):
        def on_completions(self, args, state, control, rollout, **_):
            seen.extend(rollout.sampled.prompts)

    how = {"prompts": None, "reward_funcs": [shortest], "environment_factory": Sum}
    trainer = trainer_of(tmp_path, callbacks=[Take()], max_steps=3, shuffle_dataset=False, **how)
    assert {tool.__name__ for tool in trainer.tools} == {"calculator"}
    trainer.train()
    texts = [prompt[-1]["content"] for prompt in seen]
    assert len(trainer.environments) == 16
    # 3 steps of 4 groups: all 4 completions of a prompt play the same game, each prompt another
    groups = [set(texts[at : at + 4]) for at in range(0, 48, 4)]
    assert [len(group) for group in groups] == [1] * 12
    assert len(set(texts)) == 12
    with pytest.raises(ConfigError, match="max_steps limits the length"):
        trainer_of(tmp_path, max_steps=-1, **how)
    with pytest.raises(ConfigError, match="a table of environments requires a `train_dataset`"):
        trainer_of(tmp_path, **how | {"environment_factory": {"a": Sum}})
    several = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3}
    trainer = trainer_of(tmp_path, **how | several)
    assert len(trainer.train_dataset) == 24  # two batches of four prompts in a step
    rows = Dataset.from_dict({"seed": range(8)})  # without prompts
    trainer = trainer_of(tmp_path, dataset=rows, **how | {"max_steps": 1})
    trainer.train()
    assert all(one.numbers for one in trainer.environments)


def test_settings_that_do_not_fit_are_refused(tmp_path, trainer_of):
    with pytest.raises(ConfigError, match="no effect without tools"):
        trainer_of(tmp_path, max_tool_calling_iterations=3)
    with pytest.raises(ConfigError, match="there is no reward"):
        trainer_of(tmp_path, reward_funcs=None, environment_factory=Silent)
    with pytest.raises(ConfigError, match="contains tools, but the kit adds the tools"):
        trainer_of(tmp_path, tools=[calculator], chat_template_kwargs={"tools": [{"a": 1}]})
    with pytest.raises(ConfigError, match="eval_dataset"):
        trainer_of(tmp_path, tools=[calculator], eval_dataset=rk.load_prompts("sums"))
    with pytest.raises(ConfigError, match="partial_rollouts"):
        trainer_of(tmp_path, tools=[calculator], partial_rollouts=True)
    with pytest.raises(ConfigError, match="need the kit's own step"):
        trainer_of(tmp_path, tools=[calculator], step="trl")
