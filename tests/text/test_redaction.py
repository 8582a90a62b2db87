"""Secrets are masked in texts, settings, files, logs and tracebacks; other text is unchanged."""

import json
import logging
import os
import random
import re
import string
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.config.run_file import RunConfig
from rloo_kit.text import redaction
from rloo_kit.text.redaction import (
    is_secret_name,
    redact,
    redact_tree,
    redacted_logs,
    remember_arguments,
    remember_secret,
    remember_settings,
    without_hidden,
)
from rloo_kit.text.wording import first_line, format_value

ROOT = Path(__file__).resolve().parents[2]
LETTERS = string.ascii_letters + string.digits
# The same names of tests in every process.
DICE = random.Random(5)
SECRET = "Zq7Lw2Xv9Rt4Yp6Mn3Kd8"
ODD = 'pass"word\\with é and <tags> & 7'


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    for name in list(os.environ):
        if is_secret_name(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(redaction, "_known", {})


def some(length, letters=LETTERS):
    """A new random text that ends in a digit."""
    return "".join(DICE.choices(letters, k=length - 1)) + "7"


# --- names and values ----------------------------------------------------------------------------


NAMES = """HF_TOKEN OPENAI_API_KEY_2 AWS_ACCESS_KEY_ID PGPASSWORD GITHUB_PAT apiKey token x-api-key
Authorization trainer.hub_token credentials"""
OTHERS = """KEYBOARD TOKENIZERS_PARALLELISM HF_TOKEN_PATH SSH_AUTH_SOCK max_new_tokens pad_token
pad_token_id tokenizer api_key_env token_level_kl SSH_PUBLIC_KEY"""


def test_names_of_secrets_are_recognised_and_none_that_resemble_them():
    assert [name for name in NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in OTHERS.split() if is_secret_name(name)] == []


@pytest.mark.parametrize(
    "value",
    ["question", "12345678", "2026-11-21", "/usr/lib/key.pem",
     "~/keys/mine.json", "not-needed", "https://example.org/oauth", "[hidden: HF_TOKEN]"],
)  # fmt: skip
def test_plain_value_is_not_masked_elsewhere(value):
    remember_secret(value, "api_key")
    assert redact(f"a {value} b") == f"a {value} b"


@pytest.mark.parametrize("value", [SECRET, ODD, "hunter22", "correct-horse-battery-staple"])
def test_remembered_value_is_masked(value):
    remember_secret(value, "api_key")
    assert redact(f"a {value} b") == "a [hidden: api_key] b"


# --- known values --------------------------------------------------------------------------------


def test_working_folder_is_no_secret(monkeypatch):
    monkeypatch.setenv("PWD", "/srv/max2/runs")
    assert redact("gsm8k:/srv/max2/runs/copy") == "gsm8k:/srv/max2/runs/copy"


def test_environment_secret_is_masked_as_soon_as_it_is_set(monkeypatch):
    assert SECRET in redact(SECRET)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("DATABASE", "postgres://me:s3cr%2Ft-word@host/x")
    assert redact(f"it is {SECRET}") == "it is [hidden: MY_TOKEN]"
    assert "s3cr" not in redact("no s3cr/t-word, no s3cr%2Ft-word")
    monkeypatch.delenv("MY_TOKEN")
    assert SECRET not in redact(f"it was {SECRET}")


@pytest.mark.parametrize("secret", [SECRET, ODD])
@pytest.mark.parametrize(
    "written",
    [json.dumps, lambda s: json.dumps(s, ensure_ascii=False), repr, quote,
     lambda s: quote(s, safe="")],
    ids=["json", "unicode", "repr", "percent", "all percent"],
)  # fmt: skip
def test_secret_is_found_in_each_encoding(secret, written):
    remember_secret(secret, "K")
    found = redact(f"before {written(secret)} after")
    assert re.fullmatch(r"before [\"'\\]*\[hidden: K\][\"'\\]* after", found)


@pytest.mark.parametrize("secret", [SECRET, ODD, "line one 1\nline two 2", "tab\tand \x07 bell 8"])
def test_masked_json_stays_valid(secret):
    remember_secret(secret, "K")
    for ascii_only in (True, False):
        text = json.dumps({"a": f"x {secret} y", secret: [secret, 1]}, ensure_ascii=ascii_only)
        found = json.loads(redact(text))
        assert found == {"a": "x [hidden: K] y", "[hidden: K]": ["[hidden: K]", 1]}


def test_secrets_of_settings_and_arguments_are_remembered():
    settings = {"rewards": [{"name": "judge", "api_key": some(20)}], "headers": {"auth": some(20)}}
    remember_settings(settings | {"data": {"prompts": f"https://me:{KEY}@example.org/x"}})
    remember_arguments(["--set", f"trainer.hub_token='{SECRET}'", "trainer.max_steps=12345678"])
    text = redact(f"{settings} {SECRET} 12345678 {KEY}")
    assert text == (
        "{'rewards': [{'name': 'judge', 'api_key': '[hidden: api_key]'}], "
        "'headers': {'auth': '[hidden: auth]'}} [hidden: hub_token] 12345678 [hidden: password]"
    )


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    ["hf_" + some(34), "sk-proj-" + some(30), "sk-ant-api03-" + some(40)],
)
def test_token_shape_is_masked_anywhere(token):
    for text in (token, f"({token})", f"a\\n{token}\\nb", f'{{"x": "{token}"}}', f"x={token}&y"):
        assert redact(text) == text.replace(token, "[hidden]")


KEY = some(24)


@pytest.mark.parametrize(
    "text",
    [f"Authorization: Bearer {KEY}", f"{{'Authorization': 'Bearer {KEY}'}}",
     json.dumps(json.dumps({"authorization": f"Basic {KEY}"})), f"-H 'X-Api-Key: {KEY}'",
     f"https://me:{KEY}@example.org/x", f"https:/me:{KEY}@example.org/x",
     f"https://example.org/?a=1&token={KEY}&b=2", f"https://example.org/?api_key={KEY}",
     f"export WANDB_API_KEY={some(40, '0123456789abcdef')}".replace("7", KEY),
     f"AWS_SECRET_ACCESS_KEY: '{KEY}'", f"hub_token={KEY!r}", f"https://me:{KEY[:4]}@example.org"],
    # Pytest puts the name of a test into the environment.
    ids=range(12),
)  # fmt: skip
def test_value_after_a_telling_word_is_masked(text):
    found = redact(text)
    assert "[hidden]" in found
    assert KEY[:4] not in found
    assert redact(found) == found


@pytest.mark.parametrize(
    "text",
    ["The bearer of certificates of 2026", "token: hello", "What is f?key=1&b=22222222",
     "a task-force-of-two-1234567890", "12+34=46?", "http://localhost:8000/v1", "me:you@there",
     "Authorization: required", "pip install sk-learn", "mail a@b.org", "x = password: 1234",
     "a half_of_the_thing", "key=question", "ssh://git@example.org/x", "[hidden: HF_TOKEN]"],
)  # fmt: skip
def test_usual_text_is_unchanged(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "piece",
    ["A_", "sk-", "://a:", "?token", "bearer 0 ", "authorization:", "&;=token",
     "@://x", "API_KEY=1"],
)  # fmt: skip
def test_redaction_takes_linear_time(piece):
    text = f"@0{piece * (100_000 // len(piece))}"
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 2


# --- settings ------------------------------------------------------------------------------------


def test_settings_are_masked_by_name():
    def settings(hidden, password):
        return {
            "trainer": {"hub_token": hidden("hub_token"), "beta": 0.1, "pad_token": "<pad>"},
            "rewards": [{"name": "judge", "api_key": hidden("api_key"), "api_key_env": "MY_KEY"}],
            "own": {"auth": "basic", "passwords": [hidden("passwords")] * 2},
            "model": {
                "name": f"https://me:{password}@example.org/m",
                "token": True,
                "key": "question",
            },
            "empty": {"token": None, "api_key": ""},
        }

    found = redact_tree(settings(lambda name: "abc", SECRET))
    assert found == settings("[hidden: {}]".format, "[hidden]")


def test_settings_of_every_example_are_unchanged():
    for path in (ROOT / "examples").glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert redact_tree(settings) == settings
    assert redact_tree(RunConfig().as_dict()) == RunConfig().as_dict()


def test_masked_settings_are_left_out_when_read_back():
    settings = {
        "trainer": {"hub_token": SECRET, "beta": 0.1},
        "rewards": ["accuracy", {"name": "own", "api_key": SECRET, "weight": 2}],
        "data": {"prompts": f"https://me:{SECRET}@example.org/x.jsonl"},
    }
    written = yaml.safe_dump(redact_tree(settings), sort_keys=False)
    assert SECRET not in written
    assert without_hidden(yaml.safe_load(written)) == {
        "trainer": {"beta": 0.1},
        "rewards": ["accuracy", {"name": "own", "weight": 2}],
        "data": {"prompts": "https://me:[hidden]@example.org/x.jsonl"},
    }


def test_value_is_masked_before_it_is_cut(monkeypatch):
    monkeypatch.setenv("MY_KEY", SECRET)
    for length in range(60, 110):
        assert SECRET[-6:] not in format_value("x " * (length // 2) + SECRET + " y" * 60)
        assert SECRET[:6] not in first_line(ValueError("x" * (length + 60) + SECRET))


# --- files of a run ------------------------------------------------------------------------------


# Loads the training libraries.
@pytest.mark.long
def test_recorded_run_holds_no_secret(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from rloo_kit.runs.folder import write_run_file
    from rloo_kit.runs.recorder import RunRecorder

    monkeypatch.setenv("MY_KEY", ODD)
    config = RunConfig(trainer={"hub_token": "abc"}, rewards=[{"name": "own", "api_key": ODD}])
    write_run_file(tmp_path, config)
    recorder = RunRecorder(tmp_path)
    state = SimpleNamespace(global_step=1)
    row = {"step": 1, "group": 0, "prompt": f"say {ODD}", "completion": ODD, "rewards": {ODD: 1.0}}
    recorder.on_completions(None, state, None, records=[row])
    recorder.on_log(None, state, None, logs={"loss": 0.5, f"rewards/{ODD}": 1.0})
    recorder.write_end("failed", f"RewardError: {ODD}", 1, 1.0)
    recorder.write_report()
    assert (tmp_path / "report.html").exists()
    inside = json.dumps(ODD)[1:-1]
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not [form for form in (ODD, inside, "with é", "with \\u00e9") if form in text], path
    assert "hub_token: '[hidden: hub_token]'" in (tmp_path / "run.yaml").read_text()
    assert '"say [hidden: MY_KEY]"' in (tmp_path / "completions.jsonl").read_text()


def test_dotenv_secret_is_masked_beside_the_environments(tmp_path, monkeypatch):
    from rloo_kit.machine.environment import load_env_file

    other = some(24)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / ".env").write_text(f"MY_TOKEN={other}\n")
    assert load_env_file() == str(tmp_path / ".env")
    assert redact(f"{SECRET} {other}") == "[hidden: MY_TOKEN] [hidden: MY_TOKEN]"


# --- what the kit prints -------------------------------------------------------------------------


def test_logs_of_any_library_are_masked(caplog):
    remember_secret(SECRET, "K")
    with redacted_logs():
        logging.getLogger("transformers.anything").warning("key %s of %d", SECRET, 3)
    assert caplog.messages == ["key [hidden: K] of 3"]
    make_record = logging.getLogRecordFactory()
    assert make_record is logging.LogRecord


def test_traceback_of_the_command_is_masked(monkeypatch, capsys):
    def fail(*args, **others):
        raise ZeroDivisionError(SECRET)

    remember_secret(SECRET, "K")
    monkeypatch.setattr("rloo_kit.train", fail)
    assert main(["quickstart"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("ZeroDivisionError: [hidden: K]\n")
