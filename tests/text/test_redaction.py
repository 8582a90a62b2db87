"""Secrets are hidden in texts, settings, files and on the terminal; all else stays as it is."""

import base64
import html
import io
import json
import os
import random
import re
import string
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
import yaml

from rloo_kit.cli import main
from rloo_kit.config.run_file import RunConfig, make_run_config
from rloo_kit.errors import ConfigError
from rloo_kit.text import redaction
from rloo_kit.text.redaction import (
    RedactingStream,
    is_plain,
    is_secret_name,
    redact,
    redact_tree,
    remember_arguments,
    remember_secret,
    remember_settings,
    without_hidden,
)

ROOT = Path(__file__).resolve().parents[2]
LETTERS = string.ascii_letters + string.digits
DICE = random.Random(5)  # the same names of tests in every process
SECRET = "Zq7Lw2Xv9Rt4Yp6Mn3Kd8"
ODD = 'pass"word\\with é and <tags> & 7'


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    for name in list(os.environ):
        if is_secret_name(name):
            monkeypatch.delenv(name)
    monkeypatch.setattr(redaction, "_remembered", {})
    monkeypatch.setattr(redaction, "_forms", ())
    monkeypatch.setattr(redaction, "_seen", None)


def some(length, letters=LETTERS):
    """A new random text that ends in a digit."""
    return "".join(DICE.choices(letters, k=length - 1)) + "7"


# --- names and values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD",
     "MYSQL_PWD", "GITHUB_PAT", "TOKEN_OF_PROD", "OPENAI_API_KEY_2", "hub_token", "api_key",
     "apiKey", "token", "x-api-key", "Authorization", "trainer.hub_token", "credentials"],
)  # fmt: skip
def test_a_name_tells_of_a_secret(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["PYTHONHASHSEED", "KEYBOARD", "TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "SSH_AUTH_SOCK",
     "max_new_tokens", "pad_token", "eos_token", "pad_token_id", "tokens_per_micro_batch",
     "tokenizer", "api_key_env", "token_level_kl", "author", "SSH_PUBLIC_KEY", "monkey"],
)  # fmt: skip
def test_a_name_that_only_looks_like_one_does_not(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "value",
    ["true", "question", "question_text_long", "12345678", "2026-11-21", "/usr/lib/key.pem",
     "~/keys/mine.json", "not-needed", "https://example.org/oauth", "[hidden: HF_TOKEN]"],
)  # fmt: skip
def test_a_usual_value_is_not_looked_for_everywhere(value):
    assert is_plain(value)
    remember_secret(value, "api_key")
    assert redact(f"a {value} b") == f"a {value} b"


@pytest.mark.parametrize("value", [SECRET, ODD, "hunter22", "correct-horse-battery-staple"])
def test_an_unusual_value_is(value):
    remember_secret(value, "api_key")
    assert redact(f"a {value} b") == "a [hidden: api_key] b"


# --- known values --------------------------------------------------------------------------------


def test_a_secret_of_the_environment_is_hidden_as_soon_as_it_is_set(monkeypatch):
    assert SECRET in redact(SECRET)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    assert redact(f"it is {SECRET}") == "it is [hidden: MY_TOKEN]"
    monkeypatch.setenv("MY_TOKEN", f"{SECRET}-new")
    assert redact(f"it is {SECRET}-new") == "it is [hidden: MY_TOKEN]"
    monkeypatch.delenv("MY_TOKEN")
    assert SECRET not in redact(f"it was {SECRET}")


def test_the_password_in_an_address_of_the_environment_is_hidden_alone_too(monkeypatch):
    monkeypatch.setenv("DATABASE", "postgres://me:s3cr%2Ft-word@host/x")
    for text in ("s3cr%2Ft-word", "s3cr/t-word"):
        assert redact(f"no user has {text}") == "no user has [hidden: DATABASE]"


@pytest.mark.parametrize("secret", [SECRET, ODD])
@pytest.mark.parametrize(
    "written",
    [json.dumps, lambda s: json.dumps(s, ensure_ascii=False), lambda s: json.dumps(json.dumps(s)),
     repr, html.escape, quote, quote_plus, lambda s: quote(s, safe=""),
     lambda s: re.sub("%..", lambda match: match[0].lower(), quote(s))],
    ids=["json", "unicode", "twice", "repr", "html", "percent", "plus", "all percent", "lower"],
)  # fmt: skip
def test_a_secret_is_found_as_files_write_it(secret, written):
    remember_secret(secret, "K")
    found = redact(f"before {written(secret)} after")
    assert re.fullmatch(r"before [\"'\\]*\[hidden: K\][\"'\\]* after", found)


@pytest.mark.parametrize("user", ["", "u", "us", "use"])
def test_a_secret_is_found_inside_base64(user):
    remember_secret(SECRET, "K")
    header = base64.b64encode(f"{user}:{SECRET}".encode()).decode()
    assert "[hidden: K]" in redact(f"Basic value {header}")
    assert header[8:-6] not in redact(header)


def test_the_beginning_of_a_long_secret_that_was_cut_off_is_hidden():
    secret = some(40)
    remember_secret(secret, "K")
    assert redact(f"it said {secret[:25]}... and ended") == "it said [hidden: K]... and ended"


def test_every_long_line_of_a_secret_is_one():
    lines = [some(64), some(64)]
    remember_secret("\n".join(["-----BEGIN KEY-----", *lines]), "PEM")
    assert redact(f"  {lines[1]}\n") == "  [hidden: PEM]\n"


@pytest.mark.parametrize("secret", [SECRET, ODD, "line one 1\nline two 2", "tab\tand \x07 bell 8"])
def test_json_stays_valid(secret):
    remember_secret(secret, "K")
    for ascii_only in (True, False):
        text = json.dumps({"a": f"x {secret} y", secret: [secret, 1]}, ensure_ascii=ascii_only)
        found = json.loads(redact(text))
        assert found == {"a": "x [hidden: K] y", "[hidden: K]": ["[hidden: K]", 1]}


def test_secrets_of_settings_and_arguments_are_remembered():
    settings = {"rewards": [{"name": "judge", "api_key": some(20)}], "headers": {"auth": some(20)}}
    remember_settings(settings)
    remember_arguments(["--set", f"trainer.hub_token='{SECRET}'", "trainer.max_steps=12345678"])
    text = redact(f"{settings} {SECRET} 12345678")
    assert text == (
        "{'rewards': [{'name': 'judge', 'api_key': '[hidden: api_key]'}], "
        "'headers': {'auth': '[hidden: auth]'}} [hidden: hub_token] 12345678"
    )


def test_a_password_in_an_address_among_settings_is_remembered():
    remember_settings({"data": {"prompts": f"https://me:{SECRET}@example.org/x"}})
    remember_arguments([f"model.name=https://me:{KEY}@example.org/x"])
    assert redact(f"{SECRET} {KEY}") == "[hidden: password] [hidden: password]"


# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    ["hf_" + some(34), "sk-proj-" + some(30), "sk-ant-api03-" + some(40), "ghp_" + some(36),
     "github_pat_" + some(60), "xoxb-1234567890-" + some(20), "glpat-" + some(20),
     "AKIA" + some(16, string.ascii_uppercase), "AIza" + some(35),
     f"eyJ{some(20)}.eyJ{some(30)}.{some(30)}"],
)  # fmt: skip
def test_the_shape_of_a_token_is_hidden_anywhere(token):
    for text in (token, f"({token})", f"a\\n{token}\\nb", f'{{"x": "{token}"}}', f"x={token}&y"):
        assert redact(text) == text.replace(token, "[hidden]")


KEY = some(24)


@pytest.mark.parametrize(
    "text",
    [f"Authorization: Bearer {KEY}", f"{{'Authorization': 'Bearer {KEY}'}}",
     json.dumps(json.dumps({"authorization": f"Basic {KEY}"})), f"-H 'X-Api-Key: {KEY}'",
     f"https://me:{KEY}@example.org/x", f"https:/me:{KEY}@example.org/x", f"https://{KEY}@example.org/x.git",
     f"https://example.org/?a=1&token={KEY}&b=2", f"https://example.org/?api_key={KEY}",
     f"export WANDB_API_KEY={some(40, '0123456789abcdef')}".replace("7", KEY),
     f"AWS_SECRET_ACCESS_KEY: '{KEY}'", f"hub_token={KEY!r}", f"https://me:{KEY[:4]}@example.org",
     f"-----BEGIN RSA PRIVATE KEY-----\n{KEY}\n{KEY}\n-----END RSA PRIVATE KEY-----\n",
     json.dumps(f"-----BEGIN PRIVATE KEY-----\n{KEY}\n")],
    ids=range(15),  # pytest puts the name of a test into the environment
)  # fmt: skip
def test_what_follows_a_telling_word_is_hidden(text):
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
def test_usual_text_stays(text):
    assert redact(text) == text


@pytest.mark.parametrize(
    "piece",
    ["a", "A_", "sk-", "://a:", "?token", "bearer 0 ", "0 Bearer ", "authorization:", "&;=token",
     "-----BEGIN PRIVATE KEY-----\n", "eyJ0a.", "@://x", "API_KEY=1"],
)  # fmt: skip
def test_no_text_takes_long(piece):
    text = f"@0{piece * (100_000 // len(piece))}"
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 2


# --- settings ------------------------------------------------------------------------------------


def test_settings_are_hidden_by_their_names():
    settings = {
        "trainer": {"hub_token": "abc", "password": 123456, "beta": 0.1, "pad_token": "<pad>"},
        "rewards": [{"name": "judge", "api_key": "EMPTY", "api_key_env": "OPENAI_API_KEY"}],
        "model": {"name": f"https://me:{SECRET}@example.org/m", "token": True, "key": "question"},
        "credentials": {"user": "me", "of": ["x", "y"]},
        "empty": {"token": None, "api_key": ""},
    }
    assert redact_tree(settings) == {
        "trainer": {
            "hub_token": "[hidden: hub_token]",
            "password": "[hidden: password]",
            "beta": 0.1,
            "pad_token": "<pad>",
        },
        "rewards": [
            {"name": "judge", "api_key": "[hidden: api_key]", "api_key_env": "OPENAI_API_KEY"}
        ],
        "model": {"name": "https://me:[hidden]@example.org/m", "token": True, "key": "question"},
        "credentials": {"user": "[hidden: credentials]", "of": ["[hidden: credentials]"] * 2},
        "empty": {"token": None, "api_key": ""},
    }


def test_the_settings_of_every_example_stay():
    for path in (ROOT / "examples").glob("*.yaml"):
        settings = yaml.safe_load(path.read_text())
        assert redact_tree(settings) == settings
    assert redact_tree(RunConfig().as_dict()) == RunConfig().as_dict()


def test_hidden_settings_are_left_out_when_they_are_read_back():
    settings = {
        "trainer": {"hub_token": SECRET, "beta": 0.1},
        "rewards": ["accuracy", {"name": "own", "api_key": SECRET, "weight": 2}],
        "data": {"prompts": f"https://me:{SECRET}@example.org/x.jsonl"},
    }
    written = yaml.safe_dump(redact_tree(settings), sort_keys=False)
    assert SECRET not in written
    found, names = without_hidden(yaml.safe_load(written))
    assert names == ["trainer.hub_token", "rewards.1.api_key"]
    assert found == {
        "trainer": {"beta": 0.1},
        "rewards": ["accuracy", {"name": "own", "weight": 2}],
        "data": {"prompts": "https://me:[hidden]@example.org/x.jsonl"},
    }


# --- a run file that is read -------------------------------------------------------------------


def test_the_secrets_of_a_run_file_are_known_from_the_first_message_on(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"hub_tokn": 1, "api_key": SECRET, "x": SECRET}}))
    with pytest.raises(ConfigError):
        make_run_config(yaml.safe_load(path.read_text()))
    assert SECRET not in redact(SECRET)


def test_a_value_is_hidden_before_it_is_cut(monkeypatch):
    from rloo_kit.text.wording import first_line, format_value

    monkeypatch.setenv("MY_KEY", SECRET)
    for length in range(60, 110):
        assert SECRET[-6:] not in format_value("x " * (length // 2) + SECRET + " y" * 60)
        assert SECRET[:6] not in first_line(ValueError("x" * (length + 60) + SECRET))


# --- files of a run ------------------------------------------------------------------------------


def test_what_a_run_records_holds_no_secret(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from rloo_kit.runs.folder import write_run_file
    from rloo_kit.runs.recorder import RunRecorder

    monkeypatch.setenv("MY_KEY", ODD)
    config = RunConfig(trainer={"hub_token": "abc"}, rewards=[{"name": "own", "api_key": ODD}])
    write_run_file(tmp_path, config)
    recorder, state = RunRecorder(tmp_path), SimpleNamespace(global_step=1)
    row = {"step": 1, "group": 0, "prompt": f"say {ODD}", "completion": ODD, "rewards": {ODD: 1.0}}
    recorder.on_completions(None, state, None, [row])
    recorder.on_log(None, state, None, {"loss": 0.5, f"rewards/{ODD}": 1.0})
    recorder.write_end("failed", f"RewardError: {ODD}", 1, 1.0)
    recorder.write_report()
    assert (tmp_path / "report.html").exists()
    inside = json.dumps(ODD)[1:-1]
    for path in tmp_path.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not [form for form in (ODD, inside, "with é", "with \\u00e9") if form in text], path
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["trainer"] == {
        "hub_token": "[hidden: hub_token]"
    }
    assert json.loads((tmp_path / "completions.jsonl").read_text())["prompt"] == (
        "say [hidden: MY_KEY]"
    )


def test_the_report_of_an_older_run_hides_what_its_files_hold(tmp_path):
    from rloo_kit.report.page import write_report

    token = "hf_" + some(34)
    row = {"step": 1, "group": 0, "prompt": token, "completion": f"x {token}", "rewards": {}}
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / "completions.jsonl").write_text(json.dumps({**row, "score": 0.5}) + "\n")
    (tmp_path / "end.json").write_text(json.dumps({"how": "failed", "reason": f"no {token}"}))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert token not in page
    assert page.count("[hidden]") >= 3


def test_a_secret_of_dotenv_is_known_where_the_environment_has_another(tmp_path, monkeypatch):
    from rloo_kit.machine.environment import _load_dotenv

    other = some(24)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / ".env").write_text(f"MY_TOKEN={other}\n")
    assert _load_dotenv() == str(tmp_path / ".env")
    assert redact(f"{SECRET} {other}") == "[hidden: MY_TOKEN] [hidden: MY_TOKEN]"


# --- the terminal --------------------------------------------------------------------------------


@pytest.fixture
def stream():
    remember_secret(SECRET, "K")
    return RedactingStream(io.StringIO())


def test_a_secret_in_two_writes_is_hidden(stream):
    for piece in ("it is ", SECRET[:7], SECRET[7:], " so\n"):
        stream.write(piece)
    assert stream.getvalue() == "it is [hidden: K] so\n"


@pytest.mark.parametrize("length", range(1, len(SECRET)))
def test_a_secret_in_two_flushed_writes_is_hidden(stream, length):
    for piece in (f"it is {SECRET[:length]}", f"{SECRET[length:]} so"):
        stream.write(piece)
        stream.flush()
    assert stream.getvalue() == "it is [hidden: K] so"


def test_the_shape_of_a_token_in_two_flushed_writes_is_hidden(stream):
    token = "hf_" + some(34)
    for piece in (f"it is {token[:9]}", token[9:], " so\n"):
        stream.write(piece)
        stream.flush()
    assert stream.getvalue() == "it is [hidden] so\n"


def test_a_private_key_in_several_lines_is_hidden(stream):
    lines = ["-----BEGIN PRIVATE KEY-----", some(64), some(64), "-----END PRIVATE KEY-----"]
    for line in ("before", *lines, "after"):
        print(line, file=stream)
    assert stream.getvalue() == "before\n[hidden]\nafter\n"


def test_what_is_flushed_is_shown_at_once(stream):
    for text in ("before\n", "\r 50%|#### | ", "a question? "):
        stream.write(text)
        stream.flush()
        assert stream.getvalue().endswith(text)


def test_what_waited_is_shown_in_the_end(stream):
    stream.write(f"the beginning {SECRET[:5]}")
    stream.flush()
    assert stream.getvalue() == "the beginning "
    stream.finish()
    assert stream.getvalue() == f"the beginning {SECRET[:5]}"


def test_all_else_is_left_to_the_stream(stream):
    assert (stream.isatty(), stream.closed) == (False, False)
    with open(os.devnull, "w", encoding="latin-1") as file:
        wrapped = RedactingStream(file)
        assert (wrapped.encoding, wrapped.fileno()) == ("latin-1", file.fileno())


def test_the_command_hides_what_it_says_of_its_input(capsys):
    before = sys.stdout, sys.stderr
    assert main(["train", "quickstart", "--set", f"trainer.hub_token.x={SECRET}"]) == 2
    said = capsys.readouterr().err
    assert SECRET not in said
    assert "trainer.hub_token.x=[hidden: x]" in said
    assert (sys.stdout, sys.stderr) == before


UNFORESEEN = """
import os, sys, warnings
from rloo_kit import cli
def fail(args):
    print("printed", os.environ["MY_KEY"])
    warnings.warn("warned of " + os.environ["MY_KEY"])
    print(os.environ["MY_KEY"], file=sys.__stdout__)
    print(os.environ["MY_KEY"][:9], end="", flush=True)
    print(os.environ["MY_KEY"][9:], end="", file=sys.stdout)
    raise RuntimeError("failed with " + os.environ["MY_KEY"])
cli._train = fail
sys.argv = ["rloo-kit", "quickstart"]
sys.exit(cli.main())
"""


def test_the_traceback_of_an_unforeseen_error_is_hidden():
    result = subprocess.run(
        [sys.executable, "-c", UNFORESEEN], capture_output=True, text=True, timeout=60,
        env={**os.environ, "MY_KEY": SECRET},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stdout == "printed [hidden: MY_KEY]\n[hidden: MY_KEY]\n[hidden: MY_KEY]"
    assert "note: warned of [hidden: MY_KEY]\n" in result.stderr
    assert result.stderr.endswith("RuntimeError: failed with [hidden: MY_KEY]\n")
    assert SECRET not in result.stdout + result.stderr


@pytest.mark.slow
def test_none_of_a_hundred_planted_secrets_is_found_after_real_runs():
    script = [sys.executable, str(ROOT / "tests/scripts/planted_secrets.py"), "100"]
    result = subprocess.run(script, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
