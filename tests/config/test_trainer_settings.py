"""Trainer settings: the table, TRL's names, older names and the batch."""

import itertools
import math
import re
import warnings
from dataclasses import MISSING
from importlib.util import find_spec
from pathlib import Path

import pytest

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


NOT_SWITCHES = ("yes", 1, None, [True])
OWN = {  # right values, then wrong ones
    "tokens_per_micro_batch": ((None, 1, 65536), (0, -1, 1.5, True, "4096", [1])),
    "kl_estimator": (("k1", "k3"), ("k2", 1)),
    "missing_eos_penalty": ((None, 0, 0.5, 2), (-0.1, "1e-1", True, math.nan, math.inf)),
    "normalize_reward": ((None, True, False, "batch", "moving"), ("group", "true", 2)),
    "baseline": (("leave_one_out",), ("shrinkage", None)),
    "loss": (("clipped",), ("clip", None)),
    "combine": (("sum", "normalize_then_sum"), ("normalise_then_sum", None)),
    "thinking_budget": ((None, 1, 511), (0, 1.5)),
    "on_reward_error": (("stop", "skip"), ("ignore", None)),
    "reward_timeout_seconds": ((None, 0.5, 60), (0, math.inf)),
    "max_tool_calling_iterations": ((None, 0, 3), (-1, 1.5, True)),
    "on_tool_error": (("tell", "stop"), ("skip", None)),
    "tool_timeout_seconds": ((None, 0.5, 60), (0, math.inf)),
    "dynamic_sampling_rounds": ((1, 100), (0, 101, 1.5, None)),
    "generation": (("auto", "vllm", "server", "transformers"), ("vLLM", None)),
    "rollout_correction": ((None, "sequence", "token"), ("tokens", True)),
    "rollout_correction_cap": ((1, 8), (0.5, None, math.inf)),
    "dry_run": ((None, True, False), ("auto", 2)),
    "stop_on": (
        (None, [], ["kl_explosion", "reward_collapse"]),
        ("kl_explosion", ["kl"], ["slow_reward"], [1], True, {"kl_explosion": 1}),
    ),
    "keep_last": ((1, 100), (0, 1.5, None)),
    "keep_best": ((0, 5), (-1, 0.5, None)),
    "max_hours": ((None, 0.5), (0, math.inf)),
    "max_skipped_steps": ((1, 3), (0, 1.5, None)),
    **{field.name: ((True, False), NOT_SWITCHES) for field in OWN_FIELDS if field.type is bool},
    # fields of TRL with a range
    "beta": ((0, 0.05, 100), (-0.1, 101, None, "x")),
    "learning_rate": ((1e-6, 1), (0, 1.1, None, "1e-5")),
    "temperature": ((0.001, 10), (0, 10.1, math.nan)),
    "top_p": ((0.1, 1), (0, 1.1)),
    "max_steps": ((-1, 10), (-2, 1.5, "ten")),
    "num_iterations": ((1, 1000), (0, 1001, None)),
    "max_completion_length": ((1, 48), (0, 48.5, None)),
    "num_generations": ((2, 8), (0, 1, 4.0, True, None)),
}


@pytest.mark.parametrize("name", OWN)
def test_a_setting_takes_right_values_and_names_wrong_ones(name):
    right, wrong = OWN[name]
    needed = {"dynamic_sampling_rounds": {"dynamic_sampling": True}}
    needed["rollout_correction_cap"] = {"rollout_correction": "token"}
    for value in right:
        assert check_values({name: value} | needed.get(name, {})) == []
    for value in wrong:
        (error,) = check_values({name: value})
        assert error.startswith(f"trainer.{name} is {value!r}, must be ")


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.instead])
def test_a_setting_without_effect_says_what_to_write_instead(name):
    (allowed,) = RULES[name].choices
    assert check_values({name: allowed}) == []
    other = {bool: True, str: "other"}.get(type(allowed), 3)
    (error,) = check_values({name: other})
    assert re.search(r"leave it out|set those", error)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"stop_on": ["kl_explosio"]}, "did you mean 'kl_explosion'?"),
        ({"stop_on": ["kl_explosion"], "doctor": False}, "needs the doctor"),
        (
            {"thinking_budget": 64, "max_completion_length": 64},
            "thinking_budget 64 leaves no room for an answer in trainer.max_completion_length 64",
        ),
        ({"normalise_reward": True}, "'normalise_reward'; did you mean 'normalize_reward'?"),
        ({"reward_timeout": 3}, "did you mean 'reward_timeout_seconds'?"),
        ({"klcoef": 1}, "did you mean 'kl_coef'?"),
        ({"learning_rate": "1e-5"}, "write 1.0e-5"),
    ],
)
def test_an_error_names_the_nearest_name(arguments, part):
    assert part in errors_of(arguments)


def test_no_as_yaml_reads_it_is_a_strategy():
    assert translate_trainer_arguments({"save_strategy": False}) == {"save_strategy": "no"}


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
    with pytest.warns(FutureWarning, match=f"{name}={value!r} is not needed: ") as caught:
        assert translate_trainer_arguments({name: value}) == {}
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"loss_type": "dapo"}, "leave it out, RLOO has one loss"),
        ({"vespo_k_pos": 2.0}, "leave it out, only TRL's GRPO has it"),
        ({"scale_rewards": "group"}, "normalize_advantages: true"),
        ({"stop_token": "period"}, "end at the EOS token"),
        ({"stop_token_id": 0}, "end at the EOS token"),
        ({"sft_model_path": "x"}, "give it as model.name in a run file, or in Python to rk.load"),
        ({"max_prompt_length": 512}, "give it as data.max_prompt_tokens in a run file"),
        ({"vllm_sampling_params": object()}, "set temperature, top_p"),
    ],
)
def test_what_would_mean_something_else_is_refused(arguments, says):
    assert says in errors_of(arguments)


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"total_episodes": 1000}, 125),
        ({"total_episodes": 1001}, 126),
        ({"total_episodes": 1000, "gradient_accumulation_steps": 4, "num_iterations": 2}, 64),
        ({"total_episodes": 1000, "steps_per_generation": 4}, 128),
        ({"total_episodes": 1000, "generation_batch_size": 32}, 128),
        ({"total_episodes": 1000, "per_device_train_batch_size": 40, "num_generations": 8}, 25),
    ],
)
def test_total_episodes_becomes_optimizer_steps(arguments, steps, monkeypatch):
    with pytest.warns(FutureWarning, match=f"total_episodes is max_steps here: max_steps={steps} "):
        assert translate_trainer_arguments(arguments)["max_steps"] == steps
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(FutureWarning):
        assert translate_trainer_arguments(arguments)["max_steps"] in (steps // 2, steps // 2 + 1)


def test_total_episodes_is_a_number_of_completions():
    for episodes in (0, 2.5, "many", True):
        assert "a whole number of completions" in errors_of({"total_episodes": episodes})
    assert "keep max_steps" in errors_of({"total_episodes": 8, "max_steps": 1})


def test_new_names_pass_unchanged_and_without_a_warning():
    arguments = {"beta": 0.1, "num_generations": 8, "optim": "adamw_torch"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert translate_trainer_arguments(arguments) == arguments


def test_all_wrong_names_and_values_come_in_one_message():
    message = errors_of(
        {"num_generation": 4, "temprature": 1, "kl_coef": 0, "beta": 0, "kl_estimator": "k2"}
    )
    for part in ("'num_generations'?", "'temperature'?", "keep beta", "kl_estimator is 'k2'"):
        assert part in message


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


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"num_generations": 1},
            "num_generations is 1, must be greater than or equal to 2",
        ),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "give one of them"),
        ({"generation_batch_size": 12}, "set trainer.generation_batch_size to 8 or 16"),
        ({"num_generations": 3}, "set trainer.per_device_train_batch_size to 6 or 9"),
        ({"per_device_train_batch_size": 2, "num_generations": 8}, "would have 2 completions"),
    ],
)
def test_a_wrong_batch_says_what_to_set(batch, message):
    assert message in errors_of(batch)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({}, (8, 4, 1, 2)),
        ({"gradient_accumulation_steps": 3}, (24, 4, 3, 6)),
        ({"gradient_accumulation_steps": 3, "steps_per_generation": 2}, (16, 4, 2, 4)),
        ({"generation_batch_size": 32, "num_generations": 8}, (32, 8, 4, 4)),
    ],
)
def test_the_plan_counts_completions_slices_and_prompts(batch, expected):
    plan = batch_plan(batch)
    found = (plan.num_completions, plan.num_generations, plan.steps_per_generation)
    assert (*found, plan.num_prompts) == expected


@pytest.mark.parametrize(
    ("accumulation", "slices", "expected"),
    [(2, 2, True), (4, 2, True), (2, 4, False), (3, 2, False)],
)
def test_a_batch_is_on_policy_if_it_fills_whole_steps(accumulation, slices, expected):
    batch = {"gradient_accumulation_steps": accumulation, "steps_per_generation": slices}
    assert batch_plan(batch).is_on_policy == expected


def test_a_correction_of_the_trainers_own_numbers_is_refused():
    other = {"generation": "transformers"}  # tests/reference has the pairs that exclude each other
    (error,) = check_values({"rollout_correction": "token"} | other)
    assert "rollout_correction" in error
    assert "trainer.generation" in error
    assert check_values(other) == []
