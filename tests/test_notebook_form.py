"""The form of a notebook: what its fields come to, the run file it writes, its buttons."""

import json
import time

import pytest
import yaml

import rloo_kit as rk
from rloo_kit import notebook_form
from rloo_kit.config.run_file import find_run_file, make_run_config, read_run_file
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.notebook_form import BUTTONS, FIELDS, Form, preview

GOOD = {
    "model": "tiny-thinker",
    "prompts": "arithmetic",
    "rewards": "accuracy",
    "card": "this",
    "settings": "",
}


def quickstart():
    return yaml.safe_load(find_run_file("quickstart").read_text(encoding="utf-8"))


def read(tmp_path, **fields):
    return preview(quickstart(), {**GOOD, **fields}, tmp_path)


# --- what the fields come to ----------------------------------------------------------------------


def test_shows_plan_three_samples_and_run_file(tmp_path):
    found = read(tmp_path, rewards="accuracy, thinking_format:0.1", card="8GB")
    assert found.errors == {}
    assert "tiny-thinker on a card of 8 GB: fits" in found.plan
    assert found.samples.count("What is ") == 3
    assert found.samples.count("accuracy 1.000, thinking_format 1.000") == 3
    assert found.output_dir == "runs/quickstart"


def test_the_run_file_says_what_the_fields_say(tmp_path):
    rewards = "accuracy:2, {name: length_band, low: 6, high: 20, weight: 0.5}"
    settings = "trainer.max_steps=3\ntrainer.learning_rate=5e-4\noutput_dir=runs/mine"
    settings += "\n  \nvllm.enforce_eager=true"
    found = read(tmp_path, rewards=rewards, settings=settings)
    path = tmp_path / "form.yaml"
    path.write_text(found.run_file, encoding="utf-8")
    expected = quickstart() | {"rewards": yaml.safe_load(f"[{rewards}]")}
    assert read_run_file(path) == make_run_config(
        expected, settings.replace("  \n", "").splitlines()
    )
    assert read_run_file(path).trainer["learning_rate"] == 5e-4


@pytest.mark.parametrize(
    ("field", "text", "sentence"),
    [
        ("model", "./nowhere", "model './nowhere' does not exist: give a model's folder"),
        ("model", "", "the config of model '' cannot be read"),
        ("prompts", "nowhere.jsonl", "data file 'nowhere.jsonl' does not exist: give the path"),
        ("rewards", "acuracy", "unknown reward 'acuracy'; did you mean 'accuracy'?"),
        ("rewards", "", "rewards: is empty, so there is nothing to learn from"),
        ("rewards", "accuracy, {name", "rewards is '[accuracy, {name]', must be a valid list"),
        ("rewards", "judge", "reward 'judge' cannot be made from {}"),
        ("card", "large", "'large' is no size of a card: give one such as 12GB"),
        ("settings", "trainer.num_generation=8", "did you mean 'num_generations'?"),
        ("settings", "beta 0.1", "is not of the form section.key=value"),
        ("settings", "trainer.max_completion_length=900", "leaves no space for a prompt"),
        ("settings", "data.level=9", "arithmetic has the levels 1 to 5, not 9"),
    ],
)
def test_a_mistake_gives_its_sentence_at_its_field(tmp_path, field, text, sentence):
    found = read(tmp_path, **{field: text})
    at = "prompts" if "level" in text else field
    assert set(found.errors) == {at}
    assert sentence in found.errors[at]
    assert not found.run_file
    assert read(tmp_path).errors == {}


def test_a_mistake_in_each_field_is_found_at_once(tmp_path):
    wrong = {"model": "./nowhere", "prompts": "nowhere.jsonl", "rewards": "acuracy",
             "card": "large", "settings": "trainer.num_generation=8"}  # fmt: skip
    assert set(read(tmp_path, **wrong).errors) == set(FIELDS)


def test_a_reward_whose_column_is_missing_is_found(tmp_path):
    sentence = read(tmp_path, prompts="countdown").errors["rewards"]
    assert sentence.startswith("reward 'accuracy' needs the dataset column 'answer'")


def test_accuracy_of_a_worked_task_is_refused_at_the_rewards(tmp_path):
    answer = "It is <<1+2=3>>3.\n#### 3"
    rows = [{"question": f"Day {n}. 1 + 2?", "answer": answer} for n in range(300)]
    (tmp_path / "copy.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = read(tmp_path, rewards="accuracy", prompts="gsm8k:copy.jsonl")
    assert set(found.errors) == {"rewards"}
    assert "write {name: accuracy, match: number}" in found.errors["rewards"]
    right = "{name: accuracy, match: number}"
    found = read(tmp_path, rewards=right, prompts="gsm8k:copy.jsonl")
    assert not found.errors
    assert "accuracy 1" in found.samples


def test_paths_start_at_the_folder_of_the_run_file(tmp_path):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "Why?", "answer": "So"}) + "\n")
    (tmp_path / "polite.py").write_text(
        "def polite(completions):\n    return [0.5] * len(completions)"
    )
    options = {"rewards": "accuracy, polite.py:polite", "settings": "data.held_out=0"}
    found = read(tmp_path, prompts="mine.jsonl", **options)
    assert found.errors == {}
    assert "accuracy 1.000, polite 0.500" in found.samples


def test_rewards_that_ask_a_model_are_not_called(tmp_path):
    judge = "{name: judge, model: m, base_url: 'http://127.0.0.1:9/v1', only_if: thinking_format}"
    found = read(tmp_path, rewards=f"accuracy, thinking, {judge}")
    assert found.errors == {}
    assert found.samples.endswith("only the check asks: thinking, judge")


# --- the form -------------------------------------------------------------------------------------


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("rloo_kit.notebook_form.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install ipywidgets"):
        rk.form()


def test_a_wrong_run_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {betta: 1}")
    with pytest.raises(ConfigError, match="betta"):
        rk.form(tmp_path / "mine.yaml")


def until(form, condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, (form.state, form.parts["status"].value)
        time.sleep(0.05)


def pressable(form):
    return {name for name in BUTTONS if not form.buttons[name].disabled}


@pytest.fixture
def form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = Form("form.yaml")
    yield form
    form._timer.cancel()
    form._stop()
    form._end_reader()  # other tests count the processes that are left


def test_the_form_begins_with_the_quickstart(form):
    values = {name: field.value for name, field in form.fields.items()}
    assert values == GOOD
    assert pressable(form) == set()


def test_the_form_begins_with_its_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rewards = ["accuracy", {"name": "length_band", "low": 6, "high": 20}]
    content = {"model": {"name": "mine", "max_seq_length": 999}, "rewards": rewards}
    (tmp_path / "form.yaml").write_text(yaml.safe_dump(content))
    form = Form("form.yaml")
    assert form.fields["model"].value == "mine"
    assert form.fields["rewards"].value == "accuracy, {high: 20, low: 6, name: length_band}"
    form.start.value = "qwen3-8b-16gb"
    assert form.fields["model"].value == read_run_file("qwen3-8b-16gb").model.name
    form._timer.cancel()


@pytest.mark.long
def test_buttons_from_typing_to_resume(form, tmp_path):
    small = ["trainer.per_device_train_batch_size=8", "data.held_out=8", "trainer.save_steps=1"]
    form.fields["rewards"].value = "acuracy"
    until(form, lambda: form.found is not None)
    assert "unknown reward" in form.parts["rewards"].value
    assert pressable(form) == set()
    form.fields["rewards"].value = "accuracy"
    form.fields["settings"].value = "\n".join([*small, "trainer.max_steps=400"])
    until(form, lambda: form.found is not None)
    assert form.parts["rewards"].value.endswith("></b>")
    assert pressable(form) == {"check", "train"}

    form.press("train")
    assert pressable(form) == set()
    assert form.fields["model"].disabled
    until(form, lambda: form.state == "running")
    assert pressable(form) == {"stop"}
    until(form, lambda: any("step" in line and "/400" in line for line in form._log))
    form.press("stop")
    until(form, lambda: "train: " in form.parts["status"].value)
    assert "steps, in runs/quickstart" in form.parts["status"].value
    assert pressable(form) == {"check", "train", "resume"}
    assert "data:image/png" in form.parts["figure"].value
    assert "<iframe" in form.parts["report"].value
    steps = json.loads((tmp_path / "runs/quickstart/end.json").read_text())["steps"]
    assert 1 <= steps < 400

    form.fields["settings"].value = "\n".join([*small, f"trainer.max_steps={steps + 1}"])
    until(form, lambda: form.found is not None)
    form.press("resume")
    until(form, lambda: f"resume: {steps + 1} steps, in" in form.parts["status"].value)
    assert not (tmp_path / "runs/quickstart-2").exists()


@pytest.mark.long
def test_an_error_of_a_run_is_shown(form, tmp_path):
    until(form, lambda: form.found is not None)
    (tmp_path / "runs").write_text("a file where the folder should be")
    form.press("train")
    until(form, lambda: "output_dir" in form.parts["status"].value)
    assert pressable(form) == {"check", "train"}


def test_reading_that_takes_too_long_is_said_at_the_prompts(form, monkeypatch):
    monkeypatch.setattr(notebook_form, "LIMIT", 0.0)
    form.fields["settings"].value = "trainer.max_steps=2"
    until(form, lambda: form.parts["prompts"].value.count("to try again"))
    assert "correct the fields first" in form.parts["status"].value


def test_a_run_file_that_cannot_be_written_is_said(form):
    until(form, lambda: "train" in pressable(form))
    form.path = form.path.parent / "gone" / "form.yaml"
    form.press("train")
    assert "cannot be written (No such file or directory)" in form.parts["status"].value
    assert form.state == "idle"


@pytest.mark.long
def test_check_says_what_the_rewards_do(form):
    form.fields["settings"].value = "trainer.per_device_train_batch_size=8"
    until(form, lambda: form.found is not None)
    form.press("check")
    until(form, lambda: form.state == "idle" and "check: " in form.parts["status"].value)
    assert "in-group" in form.parts["log"].value
    assert not form.path.parent.joinpath("runs").exists()
