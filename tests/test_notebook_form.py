"""The form of a notebook: the run file that its fields say, and its buttons."""

import json
import signal
import time

import pytest
import yaml

import rloo_kit as rk
from rloo_kit.config.run_file import find_run_file, make_run_config, read_run_file
from rloo_kit.errors import ConfigError, SetupError
from rloo_kit.notebook_form import Form

SMALL = (
    "trainer.per_device_train_batch_size=8\ndata.held_out=0\ntrainer.save_steps=1\n"
    "trainer.max_completion_length=16\n"
)


@pytest.fixture
def form(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form = Form("form.yaml")
    yield form
    if form.process is not None:
        form.process.kill()
        form.process.wait()


def until(form, condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, {name: part.value for name, part in form.parts.items()}
        time.sleep(0.05)


def says(form, name, text):
    until(form, lambda: text in form.parts[name].value)


def pressable(form):
    return {name for name, button in form.buttons.items() if not button.disabled}


# --- the run file ---------------------------------------------------------------------------------


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("rloo_kit.notebook_form.find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install ipywidgets"):
        rk.form()


def test_a_wrong_run_file_is_refused(tmp_path):
    (tmp_path / "mine.yaml").write_text("trainer: {betta: 1}")
    with pytest.raises(ConfigError, match="betta"):
        rk.form(tmp_path / "mine.yaml")


def test_the_form_begins_with_the_quickstart(form):
    values = {name: field.value for name, field in form.fields.items()}
    assert values == {"model": "tiny-thinker", "prompts": "arithmetic", "rewards": "accuracy",
                      "card": "this", "settings": ""}  # fmt: skip
    assert pressable(form) == {"plan", "check", "train", "resume"}


def test_the_buttons_stand_above_the_fields(form):
    """A long run file must not push them out of sight."""
    shown = form.page.children
    (buttons,) = (box for box in shown if hasattr(box, "children"))
    assert set(buttons.children) == {*form.buttons.values()}
    assert shown.index(buttons) < min(shown.index(field) for field in form.fields.values())


def test_the_form_begins_with_its_own_file(form):
    rewards = ["accuracy", {"name": "length_band", "low": 6, "high": 20}]
    content = {"model": {"name": "mine", "max_seq_length": 999}, "rewards": rewards}
    form.path.write_text(yaml.safe_dump(content))
    form = Form("form.yaml")
    assert form.fields["model"].value == "mine"
    assert form.fields["rewards"].value == "accuracy, {high: 20, low: 6, name: length_band}"
    form.start.value = "qwen3-8b-16gb"
    assert form.fields["model"].value == read_run_file("qwen3-8b-16gb").model.name


def test_the_run_file_says_what_the_fields_say(form):
    rewards = "accuracy:2, {name: length_band, low: 6, high: 20, weight: 0.5}"
    settings = ["trainer.max_steps=3", "data={prompts: sums, held_out: 0}",
                "trainer.learning_rate=5e-4", "output_dir=runs/mine",
                "vllm.enforce_eager=true"]  # fmt: skip
    form.fields["rewards"].value = rewards
    form.fields["settings"].value = "\n  \n".join(settings)
    form._write()
    quickstart = yaml.safe_load(find_run_file("quickstart").read_text(encoding="utf-8"))
    expected = quickstart | {"rewards": yaml.safe_load(f"[{rewards}]")}
    assert read_run_file(form.path) == make_run_config(expected, settings)
    assert read_run_file(form.path).trainer["learning_rate"] == 5e-4


@pytest.mark.parametrize(
    ("field", "text", "sentence"),
    [
        ("model", "", "model.name is None"),
        ("rewards", "", "rewards: is empty: give at least one reward"),
        ("rewards", "accuracy, {name", "rewards is '[accuracy, {name]', must be a valid list"),
        ("settings", "trainer.num_generation=8", "did you mean 'num_generations'?"),
        ("settings", "beta 0.1", "does not have the form section.key=value"),
    ],
)
def test_a_mistake_in_the_run_file_gives_its_sentence(form, field, text, sentence):
    form.fields[field].value = text
    form.run("train")
    assert form.process is None
    assert sentence in form.parts["status"].value.replace("&#x27;", "'")
    assert not form.path.exists()


@pytest.mark.parametrize("path", ["my data #2.jsonl", "2024", "a: b", "übung 🙂\x7f.csv"])
def test_a_path_means_what_the_field_says(form, path):
    for name in ("model", "prompts"):
        form.fields[name].value = f" {path}"
    form._write()
    config = read_run_file(form.path)
    assert (config.model.name, config.data.prompts) == (path, path)


def test_a_run_file_that_cannot_be_written_is_said(form):
    form.path = form.path.parent / "gone" / "form.yaml"
    form.run("train")
    assert "No such file or directory" in form.parts["status"].value
    assert "train" in pressable(form)


# --- the buttons ----------------------------------------------------------------------------------


@pytest.mark.long
def test_plan_is_shown_for_the_card(form):
    form.fields["card"].value = "8GB"
    form.run("plan")
    says(form, "status", "plan: done")
    assert "tiny-thinker on a card of 8 GB: fits" in form.parts["log"].value
    form.fields["model"].value = "./nowhere"
    form.run("plan")
    says(form, "status", "plan: ended with code 2")
    assert "give a model" in form.parts["log"].value


@pytest.mark.long
def test_buttons_from_train_to_resume(form, tmp_path):
    """The notebook's stop button ends the training, the form's ends its continuation."""
    folder = tmp_path / "runs/quickstart"
    form.fields["settings"].value = f"{SMALL}trainer.max_steps=400"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a kernel does between cells
    try:
        form.run("train")
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressable(form) == {"stop"}
    says(form, "log", "/400  reward")
    form.run("train")  # a double click
    form.process.send_signal(signal.SIGINT)  # to all processes of the kernel
    says(form, "status", "train: stopped")
    assert pressable(form) == {"plan", "check", "train", "resume"}
    assert "data:image/png" in form.parts["figure"].value
    assert "<iframe" in form.parts["report"].value
    steps = json.loads((folder / "end.json").read_text())["steps"]
    assert 1 <= steps < 400

    form.run("resume")
    says(form, "log", f"{steps + 1}/400  reward")
    form.stop()
    says(form, "status", "resume: stopped")
    end = json.loads((folder / "end.json").read_text())
    assert steps < end["steps"] < 400
    assert f"{end['steps']}/400  reward" in form.parts["figure"].value
    assert not folder.with_name("quickstart-2").exists()


def test_a_command_that_is_stopped_while_it_starts_was_stopped(form):
    form.run("plan")
    form.stop()
    says(form, "status", "plan: stopped")


@pytest.mark.long
def test_check_says_what_the_rewards_do(form):
    form.fields["settings"].value = SMALL
    form.run("check")
    says(form, "status", "check: ")
    until(form, lambda: "check" in pressable(form))
    assert "in-group" in form.parts["log"].value
    assert not form.path.parent.joinpath("runs").exists()
