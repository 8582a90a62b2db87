"""Trainer settings: the table, TRL's names, older names and the batch."""

import itertools
import re
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from rloo_kit.config.other_names import MOVED, NEEDLESS, OTHER_NAMES, REFUSED, RENAMED
from rloo_kit.config.settings import (
    DEFAULTS,
    OWN_FIELDS,
    RULES,
    TRL_DEFAULTS,
    TRL_RULES,
    on_resume,
)
from rloo_kit.config.trainer_settings import (
    batch_plan,
    check_batch,
    check_values,
    grpo_fields,
    known_trainer_fields,
    translate_trainer_arguments,
)
from rloo_kit.errors import ConfigError


def errors_of(arguments, **others):
    with pytest.raises(ConfigError) as caught:
        translate_trainer_arguments(arguments, **others)
    return str(caught.value)


# --- the table ------------------------------------------------------------------------------------


@pytest.mark.long  # imports TRL
def test_the_table_agrees_with_the_installed_trl():
    import dataclasses

    import rloo_kit as rk

    rk.setup()
    import trl

    fields = {field.name: field for field in dataclasses.fields(trl.RLOOConfig) if field.init}
    assert known_trainer_fields() == {*fields, *(field.name for field in OWN_FIELDS)}
    assert set(TRL_RULES) <= set(fields)
    repeated = ("beta", "max_completion_length", "max_grad_norm", "num_iterations", "temperature")
    for name in repeated:
        assert fields[name].default == TRL_DEFAULTS[name]


def test_every_rule_has_a_help_text_and_a_valid_default():
    for field in OWN_FIELDS:
        assert field.default is not MISSING
        assert RULES[field.name].help.endswith(".")
    assert check_values(DEFAULTS) == []


def test_what_is_learned_must_stay_on_resume():
    must = set(on_resume("must"))
    may = set(on_resume("may"))
    assert {"beta", "num_generations", "seed", "kl_estimator"} <= must
    assert {"learning_rate", "max_steps", "tokens_per_micro_batch"} <= may
    assert not must & may


RIGHT_AND_WRONG = """
    tokens_per_micro_batch: [[null, 1, 65536], [0, -1, 1.5, true, "4096", [1]]]
    kl_estimator: [[k1, k3], [k2, 1]]
    missing_eos_penalty: [[null, 0, 0.5, 2], [-0.1, "1e-1", true, .nan, .inf]]
    normalize_reward: [[null, true, false, batch, moving], [group, "true", 2]]
    baseline: [[leave_one_out], [shrinkage, null]]
    loss: [[clipped], [clip, null]]
    combine: [[sum, normalize_then_sum], [normalise_then_sum, null]]
    thinking_budget: [[null, 1, 511], [0, 1.5]]
    on_reward_error: [[stop, skip], [ignore, null]]
    reward_timeout_seconds: [[null, 0.5, 60], [0, .inf]]
    max_tool_calling_iterations: [[null, 0, 3], [-1, 1.5, true]]
    on_tool_error: [[tell, stop], [skip, null]]
    tool_timeout_seconds: [[null, 0.5, 60], [0, .inf]]
    dynamic_sampling_rounds: [[1, 100], [0, 101, 1.5, null]]
    generation: [[auto, vllm, server, transformers], [vLLM, null]]
    rollout_correction: [[null, sequence, token], [tokens, true]]
    rollout_correction_cap: [[1, 8], [0.5, null, .inf]]
    dry_run: [[null, true, false], [auto, 2]]
    stop_on:
      - [null, [], [kl_explosion, reward_collapse]]
      - [kl_explosion, [kl], [slow_reward], [1], true, {kl_explosion: 1}]
    keep_last: [[1, 100], [0, 1.5, null]]
    keep_best: [[0, 5], [-1, 0.5, null]]
    max_hours: [[null, 0.5], [0, .inf]]
    max_skipped_steps: [[1, 3], [0, 1.5, null]]
    # fields of TRL with a range
    beta: [[0, 0.05, 100], [-0.1, 101, null, x]]
    learning_rate: [[1.0e-6, 1], [0, 1.1, null, "1e-5"]]
    temperature: [[0.001, 10], [0, 10.1, .nan]]
    log_level: [[passive, info, detail], [loud, null]]
    log_level_replica: [[warning], [loud]]
    top_p: [[0.1, 1], [0, 1.1]]
    max_steps: [[-1, 10], [-2, 1.5, ten]]
    num_iterations: [[1, 1000], [0, 1001, null]]
    max_completion_length: [[1, 48], [0, 48.5, null]]
    num_generations: [[2, 8], [0, 1, 4.0, true, null]]
"""
SWITCHES = {
    field.name: ((True, False), ("yes", 1, None)) for field in OWN_FIELDS if field.type is bool
}
OWN = yaml.safe_load(RIGHT_AND_WRONG) | SWITCHES
NEEDED = {
    "dynamic_sampling_rounds": {"dynamic_sampling": True},
    "rollout_correction_cap": {"rollout_correction": "token"},
}


@pytest.mark.parametrize("name", OWN)
def test_a_setting_takes_right_values_and_names_wrong_ones(name):
    right, wrong = OWN[name]
    for value in right:
        assert check_values({name: value} | NEEDED.get(name, {})) == []
    for value in wrong:
        (error,) = check_values({name: value})
        assert error.startswith(f"trainer.{name} is {value!r}, must be ")


ERRORS = {
    "stop_on: [kl_explosio]": "did you mean 'kl_explosion'?",
    "{stop_on: [kl_explosion], doctor: false}": "needs the doctor",
    "{thinking_budget: 64, max_completion_length: 64}": (
        "thinking_budget 64 leaves no room for an answer in trainer.max_completion_length 64"
    ),
    "normalise_reward: true": "'normalise_reward'; did you mean 'normalize_reward'?",
    "reward_timeout: 3": "did you mean 'reward_timeout_seconds'?",
    "klcoef: 1": "did you mean 'kl_coef'?",
    "learning_rate: 1e-5": "write 1.0e-5",
    f"temperature: 1{'0' * 400}": "must be a valid number",
    "{reward_clip_range: [1, -1]}": "reward_clip_range is [1, -1]: write the lower limit first",
    "chat_template_kwargs: '{bad'": "is '{bad', must be a valid dictionary or valid JSON: key must",
    # what would mean something else here
    "loss_type: dapo": "leave it out, RLOO has one loss",
    "vespo_k_pos: 2.0": "leave it out, only TRL's GRPO has it",
    "scale_rewards: group": "normalize_advantages: true",
    "stop_token: period": "end at the EOS token",
    "stop_token_id: 0": "end at the EOS token",
    "sft_model_path: x": "give it as model.name in a run file; in Python, pass it to rk.load",
    "max_prompt_length: 512": "give it as data.max_prompt_tokens in a run file",
    "vllm_sampling_params: {}": "set temperature, top_p",
    "{total_episodes: 8, max_steps: 1}": "keep max_steps",
    # the batch
    "num_generations: 1": "num_generations is 1, must be greater than or equal to 2",
    "{generation_batch_size: 8, steps_per_generation: 1}": "give one of them",
    "generation_batch_size: 12": "set trainer.generation_batch_size to 8 or 16",
    "num_generations: 3": "set trainer.per_device_train_batch_size to 6 or 9",
    "{per_device_train_batch_size: 2, num_generations: 8}": "would have 2 completions",
}


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_says_what_to_write(text):
    assert ERRORS[text] in errors_of(yaml.safe_load(text))


def test_no_as_yaml_reads_it_is_a_strategy():
    assert translate_trainer_arguments({"save_strategy": False}) == {"save_strategy": "no"}


def test_a_whole_number_reaches_the_sampler_as_a_float():
    """``generate`` of transformers refuses an int here."""
    found = translate_trainer_arguments({"temperature": 2, "repetition_penalty": 3, "top_k": 4})
    assert str(found) == "{'temperature': 2.0, 'repetition_penalty': 3.0, 'top_k': 4}"


def test_json_and_one_sided_limits_of_python_are_accepted():
    given = {"chat_template_kwargs": '{"a": 1}', "reward_clip_range": (None, 1)}
    assert translate_trainer_arguments(given) == given


# --- names of other trainers ----------------------------------------------------------------------

VALUES = {"warmup_ratio": 0.1, "exp_name": "mine", "normalize_advantage": True}
VALUES |= {"multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("old", "new"), sorted(RENAMED.items() - {("total_episodes", "max_steps")})
)
def test_a_name_of_another_trainer_is_translated_with_one_warning(old, new):
    value = VALUES.get(old, 4)
    says = re.escape(f"{old} is {new} here: {new}={value!r} is used")
    with pytest.warns(FutureWarning, match=says) as caught:
        assert translate_trainer_arguments({old: value}, all_types=True) == {new: value}
    assert len(caught) == 1
    assert f"keep {new}" in errors_of({old: value, new: value})
    assert new in known_trainer_fields()


def test_every_name_has_one_answer_and_is_no_setting_here():
    assert len(OTHER_NAMES) == sum(map(len, (RENAMED, MOVED, NEEDLESS, REFUSED)))
    assert not known_trainer_fields() & OTHER_NAMES
    for name in {*MOVED, *REFUSED, *grpo_fields()} - known_trainer_fields() - {*RENAMED}:
        error = errors_of({name: "x"})
        assert error.startswith(f"unknown trainer setting {name!r}: ")
        assert "did you mean" not in error
        assert "\n" not in error


def test_every_setting_of_the_installed_unsloth_has_an_answer():
    (folder,) = find_spec("unsloth").submodule_search_locations
    source = (Path(folder) / "models" / "rl.py").read_text("utf-8")
    found = set(re.findall(r"^    (vllm_sampling_params|unsloth_\w+) *: Optional", source, re.M))
    assert len(found) > 3
    assert found <= OTHER_NAMES


SAME = [("scale_rewards", "none"), ("scale_rewards", False), ("stop_token", "eos")]
SAME += [("max_prompt_length", None), ("delta", None), ("group_by_length", False)]


@pytest.mark.parametrize(("name", "value"), [*SAME, *dict.fromkeys(NEEDLESS, 4).items()])
def test_what_changes_nothing_is_left_out_with_one_warning(name, value):
    why = NEEDLESS.get(name, "rloo-kit works this way without it")
    with pytest.warns(FutureWarning, match=f"{name}={value!r} is not needed: {why}") as caught:
        assert translate_trainer_arguments({name: value}) == {}
    assert len(caught) == 1


EPISODES = {
    "{total_episodes: 1000}": 125,
    "{total_episodes: 1001}": 126,
    "{total_episodes: 1000, gradient_accumulation_steps: 4, num_iterations: 2}": 64,
    "{total_episodes: 1000, steps_per_generation: 4}": 128,
    "{total_episodes: 1000, generation_batch_size: 32}": 128,
    "{total_episodes: 1000, per_device_train_batch_size: 40, num_generations: 8}": 25,
}


@pytest.mark.parametrize("text", EPISODES)
def test_total_episodes_becomes_optimizer_steps(text, monkeypatch):
    steps = EPISODES[text]
    with pytest.warns(FutureWarning, match=f"total_episodes is max_steps here: max_steps={steps} "):
        assert translate_trainer_arguments(yaml.safe_load(text))["max_steps"] == steps
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(FutureWarning):
        found = translate_trainer_arguments(yaml.safe_load(text))["max_steps"]
    assert found in (steps // 2, steps // 2 + 1)


@pytest.mark.parametrize("episodes", [0, 2.5, "many", True])
def test_total_episodes_is_a_number_of_completions(episodes):
    assert "a whole number of completions" in errors_of({"total_episodes": episodes})


# --- the batch ------------------------------------------------------------------------------------


def batches(sizes, accumulations, slices, totals, groups):
    names = (
        "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
        "generation_batch_size", "num_generations",
    )  # fmt: skip
    for values in itertools.product(sizes, accumulations, slices, totals, groups):
        yield {name: v for name, v in zip(names, values, strict=True) if v is not None}


def trl_rule(batch):
    """The rule of RLOOConfig's ``__post_init__`` on one process."""
    size = batch["per_device_train_batch_size"]
    group = batch["num_generations"]
    slices = batch.get("steps_per_generation")
    total = batch.get("generation_batch_size")
    if slices is not None and total is not None:
        return False
    if total is not None and total % size:
        return False
    if total is None:
        total = size * (batch["gradient_accumulation_steps"] if slices is None else slices)
    return total % group == 0


def test_a_batch_is_right_exactly_where_trls_rule_says_so():
    right = wrong = 0
    for batch in batches(range(1, 13), (1, 2, 3), (None, 1, 2, 5), (None, 8, 12, 30), range(2, 10)):
        errors = check_batch(batch)
        assert (errors == []) == trl_rule(batch), (batch, errors)
        right = right + (not errors)
        wrong = wrong + bool(errors)
    assert min(right, wrong) > 500


def test_following_the_advice_makes_the_batch_right():
    advice = 0
    for batch in batches(range(1, 14), (1, 2, 3), (None, 2), (None, 12, 16), range(2, 10)):
        for error in check_batch(batch):
            if found := re.search(r"set trainer\.(\w+) to (.*)", error):
                for size in map(int, found[2].split(" or ")):
                    advice += 1
                    assert check_batch({**batch, found[1]: size}) == [], (batch, error)
    assert advice > 100


PLANS = {  # completions, slices, prompts, and whether the batch fills whole steps
    "{}": (8, 1, 2, True),
    "{gradient_accumulation_steps: 3}": (24, 3, 6, True),
    "{gradient_accumulation_steps: 4, steps_per_generation: 2}": (16, 2, 4, True),
    "{gradient_accumulation_steps: 3, steps_per_generation: 2}": (16, 2, 4, False),
    "{gradient_accumulation_steps: 2, steps_per_generation: 4}": (32, 4, 8, False),
    "{generation_batch_size: 32, num_generations: 8}": (32, 4, 4, False),
}


@pytest.mark.parametrize("text", PLANS)
def test_the_plan_counts_completions_slices_and_prompts(text):
    plan = batch_plan(yaml.safe_load(text))
    found = (plan.num_completions, plan.steps_per_generation, plan.num_prompts, plan.is_on_policy)
    assert found == PLANS[text]


def test_a_correction_of_the_trainers_own_numbers_is_refused():
    other = {"generation": "transformers"}  # tests/reference has the pairs that exclude each other
    (error,) = check_values({"rollout_correction": "token"} | other)
    assert "rollout_correction" in error
    assert "trainer.generation" in error
    assert check_values(other) == []
