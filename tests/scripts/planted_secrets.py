"""Plant secrets where a run meets them, run the command for real, and search for every one.

python planted_secrets.py [NUMBER] [--no-hiding]

They are searched for in every byte of the folders that were written and of what the command
printed: as they are, in JSON and percent-encoded. Exits with 1 where one is found. --no-hiding
switches the masking off, and most must be found then.
"""

import argparse
import http.server
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

DICE = random.Random()
LETTERS = string.ascii_letters + string.digits


def some(length):
    return "".join(DICE.choices(LETTERS, k=length - 2)) + DICE.choice("456789") + DICE.choice("GKV")


# Known as secrets because of where they are
ANY = [
    lambda: some(32),
    lambda: f"{some(20)}/{some(10)}+{some(10)}=",
    lambda: f'{some(9)}"{some(6)}\\{some(6)}',
    lambda: f"{some(8)} é {some(8)} ß {some(8)}",
]
# Known by their shape alone
SHAPED = [
    lambda: "hf_" + some(34),
    lambda: "sk-proj-" + some(40),
    lambda: "ghp_" + some(36),
    lambda: f"eyJ{some(20)}.eyJ{some(40)}.{some(43)}",
]
PLACES = {
    "environment": ANY,
    "dotenv": ANY,
    "address": ANY[:1],  # password of an address in the environment
    "reward_setting": ANY,
    "trainer_setting": ANY,
    "set": ANY[:1],  # --set trainer.hub_token=
    "prompt": SHAPED,
    "logged": SHAPED,  # what a reward warns, logs and measures
    "raised": SHAPED,
    "judge_key": ANY[:1],  # its server echoes it
    "wrong_setting": ANY,
    "completions": SHAPED,
    "reward_model": SHAPED,
    "unexpected": SHAPED,  # traceback of an unexpected error
}


def forms_of(secret):
    """Return the texts that reveal a secret."""
    json_forms = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return {secret, *json_forms, quote(secret, safe=""), quote(secret)}


REWARDS = r"""
import json, logging, os, urllib.parse, warnings
from pathlib import Path

PLANTED = json.loads(Path(__file__).with_name("planted.json").read_text())

def reveal(text, log_metric):
    warnings.warn(f"reward: {text}", UserWarning, stacklevel=1)
    for name in ("", "transformers", "trl"):
        logging.getLogger(name).warning("reward: %s", text)
    log_metric(f"planted/{text}", 1.0)

def loud(completions, log_metric, api_keys=(), **_):
    known = [os.environ[name] for name in PLANTED["variables"]] + PLANTED["known"] + list(api_keys)
    for secret in known:
        for text in (secret, json.dumps(secret), repr(secret), urllib.parse.quote(secret)):
            reveal(text, log_metric)
    for secret in PLANTED["logged"]:
        for text in (secret, json.dumps({"token": secret}), f"https://me:{secret}@example.org/x"):
            reveal(text, log_metric)
    return [len(str(completion)) / 50 for completion in completions]

calls = []

def failing(completions, **_):
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError(" and ".join(PLANTED["raised"]))
    return [len(str(completion)) / 50 for completion in completions]
"""
UNEXPECTED = r"""
import json, sys
from rloo_kit import cli
def fail(args):
    raise ZeroDivisionError(" and ".join(json.loads(open("unexpected.json").read())))
cli._train = fail
sys.exit(cli.main(["quickstart"]))
"""
NO_HIDING = r"""
from rloo_kit.text import redaction
redaction._redact = lambda text: text
redaction.redact_tree = lambda value, name="": value
"""


class Echo(http.server.BaseHTTPRequestHandler):
    """A judge's server that refuses everything, with the key it was sent."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"error": self.headers["Authorization"]}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Bench:
    """The folder that everything happens in, and what the command printed."""

    def __init__(self, folder, secrets, *, hiding):
        self.folder, self.secrets, self.printed, self.faults = folder, secrets, b"", []
        variables = {f"PLANTED_{i}_TOKEN": s for i, s in enumerate(secrets["environment"])}
        dotenv = {f"PLANTED_{i}_API_KEY": s for i, s in enumerate(secrets["dotenv"])}
        addresses = {
            f"PLANTED_{i}_URL": f"postgres://me:{s}@localhost/x"
            for i, s in enumerate(secrets["address"])
        }
        quoted = {n: v.replace("\\", "\\\\").replace("'", "\\'") for n, v in dotenv.items()}
        self.write(".env", "".join(f"{name}='{value}'\n" for name, value in quoted.items()))
        more = {"HF_HUB_OFFLINE": "1", "RLOO_KIT_LIVE": "off", "PYTHONWARNINGS": "always"}
        self.environment = {**os.environ, **variables, **addresses, **more}
        if not hiding:
            self.write("no-hiding/sitecustomize.py", NO_HIDING)
            self.environment["PYTHONPATH"] = str(folder / "no-hiding")
        known = [*secrets["address"], *secrets["set"], *secrets["trainer_setting"]]
        self.write("rewards.py", REWARDS)
        planted = {name: secrets[name] for name in ("logged", "raised")}
        self.write("planted.json", {"variables": [*variables, *dotenv], "known": known, **planted})
        inside = " ".join([*secrets["prompt"], secrets["environment"][0], secrets["dotenv"][0]])
        self.rows("prompts", [{"prompt": f"What is {n}? {inside}", "answer": n} for n in range(20)])

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def rows(self, name, rows):
        self.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def run_file(self, name, rewards, data=(), trainer=()):
        """Write a run file; JSON is YAML too."""
        steps = {
            "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
            "max_completion_length": 16, "save_steps": 1, "report_to": ["tensorboard"],
        }  # fmt: skip
        self.write(f"{name}.yaml", {
            "model": {"name": "tiny-thinker", "max_seq_length": 1024}, "rewards": rewards,
            "data": {"prompts": "prompts.jsonl", "held_out": 0, **dict(data)},
            "trainer": {**steps, **dict(trainer)}, "output_dir": f"runs/{name}",
        })  # fmt: skip

    def run(self, *arguments, code=0, program=("-m", "rloo_kit")):
        done = subprocess.run(
            [sys.executable, *program, *arguments], cwd=self.folder, env=self.environment,
            capture_output=True, timeout=1500,
        )  # fmt: skip
        self.printed += done.stdout + done.stderr
        if code not in (None, done.returncode):
            end = done.stderr.decode(errors="replace")[-600:]
            self.faults.append(f"{arguments} ended with {done.returncode}, expected {code}: {end}")

    def texts(self):
        for path in (self.folder / "runs").rglob("*"):
            name = str(path.relative_to(self.folder))
            yield name, name.encode() + (path.read_bytes() if path.is_file() else b"")
        yield "what was printed", self.printed


def trained(bench):
    """Runs that end well, fail, and ask a judge whose server echoes the key."""
    secrets = bench.secrets
    loud = {"name": "rewards.py:loud", "api_keys": secrets["reward_setting"]}
    template = {"chat_template_kwargs": {"password": secrets["trainer_setting"]}}
    bench.run_file("finished", ["accuracy", loud], {"system": secrets["dotenv"][0]}, template)
    sets = [part for s in secrets["set"] for part in ("--set", f"trainer.hub_token={s}")]
    bench.run("train", "finished.yaml", *sets)
    bench.run("doctor", "runs/finished", code=1)
    bench.run("report", "runs/finished")
    bench.run_file("failed", ["rewards.py:failing"])
    bench.run("train", "failed.yaml", code=2)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    bench.environment["JUDGE_KEY"] = secrets["judge_key"][0]
    judge = {
        "name": "judge", "model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1",
        "api_key_env": "JUDGE_KEY", "on_failure": "skip", "rubric": "r",
    }  # fmt: skip
    bench.run_file("judged", ["accuracy", judge], trainer={"max_steps": 1})
    bench.run("train", "judged.yaml")
    server.shutdown()


def refused(bench):
    """Input that is refused with a message that names it, and an unexpected error."""
    wrong = bench.secrets["wrong_setting"]
    rewards = [{"name": "length", "api_key": s, "password": [s]} for s in wrong]
    bench.run_file("refused", rewards, trainer={"loss": {"api_key": wrong[-1]}})
    bench.run("train", "refused.yaml", code=2)
    bench.run_file("refused", rewards)
    bench.run("train", "refused.yaml", code=2)
    url = f"https://me:{wrong[0]}@example.org/x"
    bench.run("train", "quickstart", "--set", f"model.name={url}", code=2)
    bench.run("train", "quickstart", "--set", f"data.prompts={url}.jsonl", code=2)
    bench.write("unexpected.json", bench.secrets["unexpected"])
    bench.run(program=("-c", UNEXPECTED), code=1)


def checked(bench):
    """The reward lab, and a reward model."""
    secrets = bench.secrets["completions"]
    bench.rows("completions", [
        {"prompt": f"What is {n % 4} + 1?", "answer": str(n % 4 + 1),
         "completion": f"it is {n} {secrets[n % len(secrets)]}"} for n in range(16)
    ])  # fmt: skip
    bench.run_file("lab", ["accuracy"], {"prompts": "completions.jsonl"})
    given = ("--completions", "completions.jsonl", "--output-dir", "runs/lab")
    bench.run("rewards", "check", "lab.yaml", *given, code=None)
    secrets = bench.secrets["reward_model"]
    bench.rows("pairs", [
        {"prompt": f"What is {n}?", "chosen": f"{n} {secrets[n % len(secrets)]}", "rejected": "no"}
        for n in range(24)
    ])  # fmt: skip
    sets = ("--set", "max_steps=1", "--set", f"hub_token={secrets[0]}")
    bench.run("reward-model", "train", "pairs.jsonl", "--output-dir", "runs/model", *sets)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", type=int, default=100)
    parser.add_argument("--no-hiding", action="store_true")
    args = parser.parse_args()
    each = -(-args.number // len(PLACES))
    secrets = {
        place: [kinds[n % len(kinds)]() for n in range(each)] for place, kinds in PLACES.items()
    }
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        bench = Bench(Path(folder).resolve(), secrets, hiding=not args.no_hiding)
        for run in (trained, refused, checked):
            run(bench)
        texts = list(bench.texts())
    lost = 0
    for place, planted in secrets.items():
        for secret in planted:
            forms = [form.encode() for form in forms_of(secret)]
            found = [where for where, text in texts if any(form in text for form in forms)]
            lost += bool(found)
            print(*([f"one of {place} in {', '.join(found[:9])}"] if found else ()))
    print("\n".join([f"{lost} of {each * len(PLACES)} secrets were found", *bench.faults]))
    return int(bool(lost or bench.faults))


if __name__ == "__main__":
    sys.exit(main())
