"""The trainer on the embedded model: names, rewards, and Unsloth's patched class."""

import math
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import rloo_kit as rk
from rloo_kit.data.lengths import prompt_ids
from rloo_kit.errors import ConfigError
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.sampling.choice import thought_limit
from rloo_kit.training import trainer
from rloo_kit.training.step_choice import StepChoice

HERE = Path(__file__).parents[1]
TEXTS = Dataset.from_dict({"text": ["a"]})
ONE_PROMPT = Dataset.from_dict({"prompt": ["a"]})


def odd_characters(completions, **_):
    return [sum(ord(c) % 2 for c in completion[-1]["content"]) / 100 for completion in completions]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def test_of_several_gpus_one_trains(config, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 4)
    assert config().n_gpu == 1  # else transformers wraps the model in DataParallel


def test_training_moves_the_adapter_alone_and_in_float32(policy, new_trainer, config):
    model = policy[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    new_trainer(config(max_steps=2, max_completion_length=32), reward_funcs=odd_characters).train()
    moved = {n: p for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved
    assert all("lora_" in name and ".default." in name for name in moved)
    assert {p.dtype for p in moved.values()} == {torch.float32}


def test_weights_come_with_the_names(new_trainer, config):
    rewards = ["thinking:0.5", "accuracy"]
    trainer = new_trainer(reward_funcs=rewards)
    assert trainer.reward_weights.tolist() == [0.5, 1.0]
    assert trainer.reward_func_names == ["thinking", "accuracy"]
    with pytest.raises(rk.ConfigError, match="keep one"):
        new_trainer(config(reward_weights=[1.0, 1.0]), reward_funcs=rewards)


@pytest.mark.long
@pytest.mark.parametrize("resume", [False, True])
def test_a_second_training_has_the_settings_of_now(new_trainer, config, resume):
    steady = {"lr_scheduler_type": "constant", "save_strategy": "steps", "save_steps": 1}
    trainer = new_trainer(config(**steady))
    trainer.train()
    trainer.args.learning_rate = 5e-4
    trainer.args.max_steps = 2
    trainer.train(resume_from_checkpoint=resume)
    assert {group["lr"] for group in trainer.optimizer.param_groups} == {5e-4}


def test_an_optimizer_of_the_caller_stays(policy, new_trainer):
    own = torch.optim.SGD([p for p in policy[0].parameters() if p.requires_grad], lr=0.5)
    trainer = new_trainer(optimizers=(own, None))
    trainer.train()
    assert trainer.optimizer.optimizer is own


def test_rewards_read_the_template_of_the_tokenizer_that_the_trainer_takes(
    policy, new_trainer, config
):
    made = new_trainer(processing_class=None, reward_funcs="accuracy")
    assert made.processing_class is policy[1]
    assert made.reward_funcs[0].reward.thought_opened is True
    processor = SimpleNamespace(tokenizer=policy[1])  # only TRL's step trains with one
    (reward,) = trainer._load_weighted("accuracy", None, config(), processor)
    assert reward.func.reward.thought_opened is True


@pytest.mark.parametrize("processes", [1, 2])
def test_under_unsloth_each_process_loads_the_model_on_its_own_card(monkeypatch, processes):
    patched = type("UnslothRLOOTrainer", (), {"__module__": "unsloth_compiled_cache"})
    monkeypatch.setattr(trainer, "RLOOTrainer", patched)
    load = Mock()
    monkeypatch.setattr(trainer, "create_model_from_path", load)
    args = Mock(seed=1, sync_ref_model=False, model_init_kwargs=None, world_size=processes)
    trainer._prepare_policy({"model": "org/model", "processing_class": Mock()}, args, {})
    assert ("device_map" in load.call_args.kwargs) == (processes > 1)


@pytest.mark.long
def test_a_second_trainer_starts_from_the_very_adapter(policy, new_trainer):
    trained = {n: p for n, p in policy[0].named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.1)
    before = {name: p.detach().clone() for name, p in trained.items()}
    new_trainer()
    after = dict(policy[0].named_parameters())
    assert all(torch.equal(p, after[name]) for name, p in before.items())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"reward_fn": [len]}, "unknown argument 'reward_fn'; did you mean 'reward_funcs'?"),
        ({"compute_metrics": len}, "unknown argument 'compute_metrics'"),  # only of transformers'
        ({"args": TrainingArguments("a")}, "args is of type TrainingArguments, must be a Leave"),
        ({"processing_class": TEXTS}, "the fifth argument is processing_class, where TRL has eval"),
        ({"reward_funcs": []}, "there is no reward: give at least one in reward_funcs"),
        ({"reward_processing_classes": []}, "reward_processing_classes has 0 entries, but reward"),
        ({"train_dataset": None}, "`train_dataset` is required: give it to LeaveOneOutTrainer"),
        ({"train_dataset": ONE_PROMPT}, "there are 1 prompts to train on, and one batch needs 2:"),
        ({"train_dataset": [{"prompt": "a"}]}, "train_dataset is a list, must be a datasets.Data"),
        ({"eval_dataset": TEXTS}, "eval_dataset has no column 'prompt'"),
        ({"eval_dataset": {"all": TEXTS}}, "eval_dataset has no column 'prompt'"),
    ],
)
def test_wrong_parts_are_refused_before_the_training(new_trainer, arguments, says):
    with pytest.raises((rk.ConfigError, rk.DataError), match=f"^{re.escape(says)}"):
        new_trainer(**arguments)


def test_an_argument_that_unsloths_class_passes_on_is_known(new_trainer, monkeypatch):
    class Patched(trainer.RLOOTrainer):
        def __init__(self, model, **kwargs):
            super().__init__(model, **kwargs)

    monkeypatch.setattr(trainer, "RLOOTrainer", Patched)
    assert new_trainer(optimizers=(None, None))


# --- the reference of older calls ----------------------------------------------------------------


@pytest.fixture
def legacy_trainer(policy, config):
    """The call of TRL before 0.22: the reference is a model that the caller has loaded."""

    def make(reference, model=policy[0], **settings):
        return rk.LeaveOneOutTrainer(
            config=config(**settings),
            processing_class=policy[1],
            policy=model,
            ref_policy=reference,
            reward_model=odd_characters,
            train_dataset=rk.load_prompts("arithmetic", num_prompts=16),
        )

    return make


@pytest.fixture
def other_weights():
    """Another model than the policy's base: every token has the same probability."""
    model = AutoModelForCausalLM.from_pretrained(TINY_THINKER, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_ref_policy_with_other_weights_is_the_reference(
    policy, legacy_trainer, other_weights, step
):
    with pytest.warns(FutureWarning, match="ref_policy needs memory of its own"):
        trainer = legacy_trainer(other_weights, step=step)
    trainer.train()
    (row,) = (row for row in trainer.state.log_history if "objective/kl" in row)
    # the KL from the base is 0 before the first step
    uniform = math.log(len(policy[1])) - row["entropy"]
    assert row["kl"] == pytest.approx(uniform, abs=0.5)
    assert row["objective/kl"] > uniform


def test_a_model_without_a_name_has_no_reference(legacy_trainer, other_weights):
    other_weights.config._name_or_path = ""
    with pytest.raises(rk.ConfigError, match=r"beta needs a reference, .* or set beta to 0"):
        legacy_trainer(None, other_weights)


def test_the_base_is_the_reference_of_an_adapter_that_trl_makes(new_trainer, other_weights):
    other_weights.config._name_or_path = ""
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = new_trainer(model=other_weights, peft_config=lora)
    assert trainer.args.beta > 0
    assert trainer.ref_model is None


def test_a_model_without_a_name_takes_the_reference_that_is_given(legacy_trainer, other_weights):
    whole = AutoModelForCausalLM.from_pretrained(TINY_THINKER, dtype=torch.float32)
    whole.config._name_or_path = ""  # TRL would load its own reference by this name
    trainer = legacy_trainer(other_weights, whole)
    assert trainer.ref_model is other_weights
    assert trainer.beta == trainer.args.beta > 0
    with pytest.raises(rk.ConfigError, match="give another model as ref_policy"):
        legacy_trainer(whole, whole)


def test_a_ref_policy_that_is_the_policy_needs_no_memory(policy, legacy_trainer):
    with pytest.warns(FutureWarning, match="ref_policy is the policy itself"):
        assert legacy_trainer(policy[0].get_base_model()).ref_model is None


@pytest.mark.parametrize(
    ("reference", "settings", "says"),
    [
        ("some/model", {}, "ref_policy is a str, must be a loaded model"),
        (torch.nn.Linear(1, 1), {"kl_coef": 0.0}, "ref_policy works only with beta above 0"),
    ],
)
def test_a_ref_policy_without_effect_is_refused(legacy_trainer, reference, settings, says):
    with pytest.raises(rk.ConfigError, match=says):
        legacy_trainer(reference, **settings)


@pytest.mark.long
def test_an_older_notebook_trains_with_its_calls_unchanged(tmp_path):
    script = [sys.executable, str(HERE / "scripts" / "seed_notebook.py"), str(TINY_THINKER), "3"]
    done = subprocess.run(
        script, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert "length_reward: beta 0.05 0.05 steps 3" in done.stdout, done.stderr[-2000:]
    moved = re.search(r"reward model: beta 0.05 steps 3 moved (\d+)", done.stdout)
    assert moved, done.stdout
    assert int(moved[1]) > 0
    assert "kl_coef is beta here: beta=" in done.stderr
    assert not list(tmp_path.glob("unsloth_compiled_cache"))


@pytest.mark.parametrize("step", ["kit", "trl"])
def test_a_scheduled_weight_and_a_gate_in_training(new_trainer, config, step):
    def always(completions, **_):
        return [1.0] * len(completions)

    rewards = [
        {"name": odd_characters, "weight": {0: 1.0, 0.5: 0.0}},
        rk.gated(always, by=lambda completions, **_: [0.0] * len(completions), otherwise=3.0),
    ]
    trainer = new_trainer(config(max_steps=4, beta=0.0, step=step), reward_funcs=rewards)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "reward" in row]
    assert [row["rewards/odd_characters/weight"] for row in logs] == [1.0, 0.5, 0.0, 0.0]
    assert [row["rewards/always/gate_open"] for row in logs] == [0.0] * 4
    for row in logs:
        parts = row["rewards/odd_characters/weight"] * row["rewards/odd_characters/mean"] + 3.0
        assert row["reward"] == pytest.approx(parts, abs=1e-5)


def test_a_subclass_of_the_settings_has_its_own_defaults_for_tools(new_trainer, tmp_path):
    @dataclass
    class Patient(rk.LeaveOneOutConfig):
        tool_timeout_seconds: float = 100.0

    trainer = new_trainer(Patient(str(tmp_path), max_completion_length=24))
    assert trainer.args.tool_timeout_seconds == 100.0


def test_tools_end_at_the_length_of_a_model_whose_text_config_is_inside(config):
    shape = AutoConfig.for_model("gemma3", text_config={"max_position_embeddings": 77})
    tokenizer = AutoTokenizer.from_pretrained(TINY_THINKER.parent / "tiny-caller")
    parts = {"model": SimpleNamespace(config=shape), "processing_class": tokenizer}
    kit = SimpleNamespace(step_choice=StepChoice())
    make = rk.LeaveOneOutTrainer._make_tool_loop
    assert make(kit, config(), parts, {}, [add], None).limits.max_length == 77


def test_the_config_of_a_named_model_is_that_of_its_revision(new_trainer, config, monkeypatch):
    asked = []

    def load(name, **how):
        asked.append((name, how["revision"]))
        raise LookupError

    monkeypatch.setattr(trainer.AutoConfig, "from_pretrained", load)
    with pytest.raises(LookupError):
        new_trainer(config(model_init_kwargs={"revision": "v2"}), model="org/name")
    assert asked == [("org/name", "v2")]


# --- thinking budget -----------------------------------------------------------------------------


def test_a_long_thought_ends_its_completion_as_truncated(policy, new_trainer, config):
    lengths = []
    closing = policy[1].convert_tokens_to_ids("</think>")

    def note(completion_ids, **_):
        lengths.extend((len(ids), closing in ids[:12]) for ids in completion_ids)
        return [float(len(ids)) for ids in completion_ids]

    args = config(thinking_budget=12, max_completion_length=48)
    trainer = new_trainer(args, reward_funcs=note)
    trainer.train()
    assert all(closed or length <= 12 for length, closed in lengths)
    assert any(length == 12 for length, _ in lengths)
    assert trainer.state.log_history[0]["completions/truncated"] > 0


def test_a_thinking_budget_needs_marks_of_a_thought(policy):
    tokenizer = policy[1]
    tokenizer.chat_template = None
    tokenizer.convert_tokens_to_ids = lambda token: None  # it has none of the tokens
    with pytest.raises(ConfigError, match=r"thinking_budget is 12, but the marks around"):
        thought_limit(tokenizer, 12)


@pytest.mark.parametrize("asked", [True, False])
def test_unsloth_is_told_of_gradient_checkpointing(policy, new_trainer, config, asked):
    model = policy[0]
    model._unsloth_gradient_checkpointing = not asked  # its trainer on a GPU obeys this alone
    new_trainer(config(gradient_checkpointing=asked))
    assert model._unsloth_gradient_checkpointing is asked


@pytest.mark.long
def test_an_adapter_that_trl_makes_trains_in_float32(new_trainer):
    model, _ = rk.load_model("tiny-thinker", max_seq_length=128, load_in_4bit=True)
    lora = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = new_trainer(model=model, peft_config=lora)
    assert {p.dtype for p in trainer.trained_parameters().values()} == {torch.float32}


@pytest.mark.skipif(
    find_spec("triton") is None,
    reason="Unsloth's patcher needs triton: make test-gpu-contract runs it",
)
def test_sampling_under_unsloths_modules():
    """In a process of its own: the modules that a GPU gets patch transformers for good."""
    file = Path(__file__).with_name("unsloth_sampling.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed" in done.stdout


@pytest.mark.parametrize(("multiple", "least"), [(None, 257), (64, 320)])
def test_prompts_that_the_model_cannot_take_whole_are_refused(
    policy, new_trainer, config, multiple, least
):
    prompts = ["1 + 1 =", "1 " * 11]
    left = 256 - len(policy[1](prompts[1])["input_ids"])  # 256 is a multiple of both

    def trainer(longest):
        args = config(max_completion_length=longest, pad_to_multiple_of=multiple)
        return new_trainer(args, train_dataset=Dataset.from_dict({"prompt": prompts * 2}))

    trainer(left)
    with pytest.raises(rk.DataError, match="prompt 2 has") as one:
        trainer(left + 1)
    assert f"load the model with max_seq_length {least} (" in str(one.value)


def test_prompts_that_the_engine_cannot_take_whole_with_tools_are_refused(new_trainer, config):
    model, tokenizer = rk.load_model("tiny-caller", max_seq_length=512)
    tokenizer.chat_template = "{{ tools }}" + tokenizer.chat_template
    rows = rk.load_prompts("arithmetic", num_prompts=16)
    longest = max(len(prompt_ids(tokenizer, prompt)) for prompt in rows["prompt"])
    how = {"model": rk.attach_lora(model), "processing_class": tokenizer}
    args = config(vllm_max_model_length=longest + 24, step="kit")
    new_trainer(args, engine=SimpleNamespace(), **how)
    new_trainer(args, tools=[add], **how)  # the model itself samples
    with pytest.raises(rk.DataError, match=r"raise trainer\.vllm_max_model_length to"):
        new_trainer(args, tools=[add], engine=SimpleNamespace(), **how)


def test_a_correction_of_the_models_own_samples_is_warned_of(new_trainer, config):
    with pytest.warns(UserWarning, match="rollout_correction has no effect, because the trained"):
        new_trainer(config(rollout_correction="token"))


def test_a_second_training_begins_its_totals_again(new_trainer):
    trainer = new_trainer()
    episodes = set()
    for _ in range(2):
        trainer.train()
        first, last = trainer.state.log_history
        assert last["train_loss"] == pytest.approx(first["loss"], rel=1e-5)
        episodes.add(first["episode"])
    assert len(episodes) == 1
