"""Plant secrets where a run meets them, run the command for real, and search for every one.

python planted_secrets.py [NUMBER] [--folder FOLDER] [--only RUN ...] [--no-hiding]

They are searched for in every byte of the folders that were written and of what the command
printed: as they are, in JSON, percent-encoded, in base64, and cut off. Exits with 1 where one is
found. --no-hiding switches the masking off, and most must be found then.
"""

import argparse
import base64
import http.server
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import quote

DICE = random.Random()
LETTERS = string.ascii_letters + string.digits


def some(length):
    return "".join(DICE.choices(LETTERS, k=length - 2)) + DICE.choice("456789") + DICE.choice("GKV")


ANY = [
    lambda: some(32),
    lambda: f"{some(20)}/{some(10)}+{some(10)}=",
    lambda: f'{some(9)}"{some(6)}\\{some(6)}',
    lambda: f"{some(8)} é {some(8)} ß {some(8)}",
    lambda: f"{some(12)}<{some(6)}>&'{some(6)}",
]
"""Known as secrets because of where they are."""
PLAIN = ANY[:1]
SHAPED = [
    lambda: "hf_" + some(34),
    lambda: "sk-proj-" + some(40),
    lambda: "ghp_" + some(36),
    lambda: "github_pat_" + some(60),
    lambda: "glpat-" + some(20),
    lambda: "AIza" + some(35),
    lambda: f"eyJ{some(20)}.eyJ{some(40)}.{some(43)}",
]
"""Known by their shape alone."""
PLACES = {
    "environment": ("variables of the environment", ANY),
    "dotenv": (".env", ANY),
    "address": ("password of an address in the environment", PLAIN),
    "reward_setting": ("run file: parameter of a reward", ANY),
    "trainer_setting": ("run file: nested setting of the trainer", ANY),
    "set": ("--set trainer.hub_token=", PLAIN),
    "prompt": ("prompts", SHAPED),
    "logged": ("what a reward warns, logs and measures", SHAPED),
    "raised": ("what a reward raises", SHAPED),
    "judge_key": ("a judge's key that its server echoes", PLAIN),
    "wrong_setting": ("run file and --set that are refused", ANY),
    "model_address": ("model and prompts named by an address", PLAIN),
    "completions": ("completions given to rewards check", SHAPED),
    "reward_model": ("pairs and hub_token of a reward model", SHAPED),
    "card": ("arguments, model card and log of TensorBoard", SHAPED),
    "unexpected": ("traceback of an unexpected error", SHAPED),
}


def forms_of(secret):
    """Yield (bytes that reveal a secret, how it is written)."""
    escaped = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    yield secret, "as it is"
    yield from ((form, "in JSON") for form in escaped | {json.dumps(e)[1:-1] for e in escaped})
    yield from ((quote(secret, safe=safe), "percent-encoded") for safe in ("", "/"))
    for offset in range(3):
        text = base64.b64encode(b"\0" * offset + secret.encode()).decode().rstrip("=")
        yield text[4 * (offset > 0) : -2], "in base64"
    if len(secret) > 30:
        yield secret[:20], "cut off"


REWARDS = r"""
import base64, json, logging, os, urllib.parse, warnings
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
        reveal(base64.b64encode(f"user:{secret}".encode()).decode(), log_metric)
    for secret in PLANTED["logged"]:
        for text in (secret, json.dumps({"token": secret}), f"https://me:{secret}@example.org/x"):
            reveal(text, log_metric)
    return [len(str(completion)) / 50 for completion in completions]

calls = []

def failing(completions, **_):
    calls.append(1)
    if len(calls) > 1:
        try:
            raise KeyError(PLANTED["raised"][0])
        except KeyError as exc:
            raise RuntimeError(" and ".join(PLANTED["raised"])) from exc
    return [len(str(completion)) / 50 for completion in completions]
"""
CARD = r"""
import json, rloo_kit as rk
secrets = json.loads(open("card.json").read())
model, tokenizer = rk.load_model("tiny-thinker", max_seq_length=256)
args = rk.LeaveOneOutConfig(
    "runs/card", max_steps=1, per_device_train_batch_size=8, max_completion_length=16,
    report_to=["tensorboard"], hub_token=secrets[0], hub_model_id="me/model",
    run_name=secrets[-1], chat_template_kwargs={"more": {"api_key": secrets[-1]}},
)
trainer = rk.LeaveOneOutTrainer(
    model=rk.attach_lora(model), reward_funcs=[lambda completions, **_: [0.5] * len(completions)],
    train_dataset=rk.load_prompts("arithmetic", num_prompts=16), processing_class=tokenizer,
    args=args,
)
trainer.train()
trainer.create_model_card(model_name="model", tags=["planted"])
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
        self.folder, self.secrets, self.printed, self.faults = folder, secrets, [], []
        folder.mkdir(parents=True, exist_ok=True)
        variables = {f"PLANTED_{i}_TOKEN": s for i, s in enumerate(secrets["environment"])}
        dotenv = {f"PLANTED_{i}_API_KEY": s for i, s in enumerate(secrets["dotenv"])}
        addresses = {f"PLANTED_{i}_URL": f"postgres://me:{s}@localhost/x"
                     for i, s in enumerate(secrets["address"])}  # fmt: skip
        quoted = {n: v.replace("\\", "\\\\").replace("'", "\\'") for n, v in dotenv.items()}
        self.write(".env", "".join(f"{name}='{value}'\n" for name, value in quoted.items()))
        quiet = {"HF_HUB_OFFLINE": "1", "RLOO_KIT_LIVE": "off"}
        warned = {"PYTHONWARNINGS": "always::UserWarning"}
        self.environment = {**os.environ, **variables, **addresses, **quiet, **warned}
        if not hiding:
            self.write("no-hiding/sitecustomize.py", NO_HIDING)
            self.environment["PYTHONPATH"] = str(folder / "no-hiding")
        known = [*secrets["address"], *secrets["set"], *secrets["trainer_setting"]]
        self.write("rewards.py", REWARDS)
        self.write("planted.json", {"variables": [*variables, *dotenv], "known": known,
                   "logged": secrets["logged"], "raised": secrets["raised"]})  # fmt: skip
        inside = " ".join([*secrets["prompt"], secrets["environment"][0], secrets["dotenv"][0]])
        self.rows("prompts", [{"prompt": f"What is {n} + 1? {inside}", "answer": str(n + 1)}
                              for n in range(20)])  # fmt: skip

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def rows(self, name, rows):
        self.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def run_file(self, name, rewards, held_out=0, data=(), trainer=()):
        """Write a run file; JSON is YAML too."""
        steps = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
                 "max_completion_length": 16, "save_steps": 1,
                 "report_to": ["tensorboard"]}  # fmt: skip
        self.write(f"{name}.yaml", {
            "model": {"name": "tiny-thinker", "max_seq_length": 1024}, "rewards": rewards,
            "data": {"prompts": "prompts.jsonl", "held_out": held_out, **dict(data)},
            "trainer": {**steps, **dict(trainer)}, "output_dir": f"runs/{name}",
        })  # fmt: skip

    def run(self, *arguments, code=0, program=("-m", "rloo_kit"), wrote=(), is_kit=True):
        result = subprocess.run(
            [sys.executable, *program, *arguments], cwd=self.folder, env=self.environment,
            capture_output=True, timeout=1500,
        )  # fmt: skip
        name = " ".join(arguments)[:40] or f"program {len(self.printed)}"
        if is_kit:  # a program of the user's prints what it likes
            self.printed += [(f"output of {name}", result.stdout + result.stderr)]
        if code not in (None, result.returncode):
            end = result.stderr.decode(errors="replace")[-600:]
            self.faults.append(f"{name} ended with {result.returncode}, expected {code}: {end}")
        self.faults += [f"{p} is missing" for p in wrote if not (self.folder / "runs" / p).exists()]

    def texts(self):
        for path in (self.folder / "runs").rglob("*"):
            name = str(path.relative_to(self.folder))
            yield name, name.encode() + (path.read_bytes() if path.is_file() else b"")
        yield from self.printed


def finished(bench):
    """A run that ends well, whose reward reveals all it can; then its doctor and its report."""
    secrets = bench.secrets
    loud = {"name": "rewards.py:loud", "api_keys": secrets["reward_setting"]}
    tables = {"more": {"api_key": secrets["trainer_setting"][0]},
              "password": secrets["trainer_setting"]}  # fmt: skip
    bench.run_file("finished", ["accuracy", loud], held_out=2,
                   data={"system": f"Say {secrets['dotenv'][0]}."},
                   trainer={"chat_template_kwargs": tables})  # fmt: skip
    sets = [part for s in secrets["set"] for part in ("--set", f"trainer.hub_token={s}")]
    wrote = ("finished/adapter/README.md", "finished/report.html", "finished/runs")
    bench.run("train", "finished.yaml", *sets, wrote=wrote)
    bench.run("doctor", "runs/finished", code=1)
    bench.run("report", "runs/finished")


def failed(bench):
    """A run whose reward raises in its second step."""
    bench.run_file("failed", ["rewards.py:failing"])
    bench.run("train", "failed.yaml", code=2, wrote=("failed/end.json",))


def judged(bench):
    """A run whose judge's server echoes the key."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    key = bench.environment["JUDGE_KEY"] = bench.secrets["judge_key"][0]
    judge = {"name": "judge", "model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1",
             "api_key_env": "JUDGE_KEY", "on_failure": "skip", "rubric": "r",
             "extra_body": {"metadata": {"api_key": key}}}  # fmt: skip
    bench.run_file("judged", ["accuracy", judge], trainer={"max_steps": 1})
    bench.run("train", "judged.yaml", wrote=("judged/metrics.jsonl",))
    server.shutdown()


def refused(bench):
    """Input that is refused with a message that names it."""
    wrong, address = bench.secrets["wrong_setting"], "https://me:{0}@example.org/x?token={0}"
    rewards = [{"name": "length", "api_key": s, "password": [s]} for s in wrong]
    bench.run_file(
        "refused", rewards, trainer={"hub_tokn": wrong[0], "loss": {"api_key": wrong[-1]}}
    )
    bench.run("train", "refused.yaml", code=2)
    bench.run_file("refused", rewards)
    bench.run("train", "refused.yaml", code=2)
    sets = [part for s in wrong for part in ("--set", f"model.name.api_key={s}")]
    bench.run("train", "quickstart", *sets, code=2)
    url = address.format(bench.secrets["model_address"][0])
    bench.run("train", "quickstart", "--set", f"model.name={url}", code=2)
    bench.run("train", "quickstart", "--set", f"data.prompts={url}.jsonl", code=2)


def checked(bench):
    """The reward lab, and a reward model."""
    secrets = bench.secrets["completions"]
    bench.rows("completions", [
        {"prompt": f"What is {n % 4} + 1?", "group": n % 4, "step": 1, "answer": str(n % 4 + 1),
         "completion": f"it is {n} {secrets[n % len(secrets)]}"} for n in range(16)
    ])  # fmt: skip
    bench.run_file("lab", ["accuracy", "thinking"], data={"prompts": "completions.jsonl"})
    bench.run("rewards", "check", "lab.yaml", "--completions", "completions.jsonl",
              "--output-dir", "runs/lab", code=None, wrote=("lab/completions.jsonl",))  # fmt: skip
    secrets = bench.secrets["reward_model"]
    bench.rows("pairs", [{"prompt": f"What is {n}?", "chosen": f"{n} {secrets[n % len(secrets)]}",
                          "rejected": "no"} for n in range(24)])  # fmt: skip
    bench.run("reward-model", "train", "pairs.jsonl", "--output-dir", "runs/model", "--set",
              "max_steps=1", "--set", f"hub_token={secrets[0]}",
              wrote=("model/reward_model.json",))  # fmt: skip


def programs(bench):
    """A user's own program, and an unexpected error of the command."""
    bench.write("card.json", bench.secrets["card"])
    bench.run(program=("-c", CARD), wrote=("card/README.md", "card/runs"), is_kit=False)
    bench.write("unexpected.json", bench.secrets["unexpected"])
    bench.run(program=("-c", UNEXPECTED), code=1)


RUNS = {run.__name__: run for run in (finished, failed, judged, refused, checked, programs)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="kept; a temporary one where it is not given")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--no-hiding", action="store_true")
    args = parser.parse_args()
    each = -(-args.number // len(PLACES))
    secrets = {place: [kinds[n % len(kinds)]() for n in range(each)]
               for place, (_, kinds) in PLACES.items()}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        bench = Bench(
            (args.folder or Path(temporary)).resolve(), secrets, hiding=not args.no_hiding
        )
        for name in args.only:
            RUNS[name](bench)
        texts = list(bench.texts())
    found = {
        (place, secret, where, way)
        for place, planted in secrets.items()
        for secret in planted
        for form, way in forms_of(secret)
        for where, content in texts
        if form.encode() in content
    }
    lost = Counter(place for place, _ in {(place, secret) for place, secret, *_ in found})
    for place, (title, _) in PLACES.items():
        print(f"{title:<48} planted {each:>3}  found {lost[place]:>3}")
    for (place, where, way), number in Counter((p, w, how) for p, _, w, how in found).most_common(
        40
    ):
        print(f"  {number} of {place} in {where}, {way}")
    print("\n".join([f"searched {sum(len(c) for _, c in texts):,} bytes", *bench.faults]))
    return int(bool(found or bench.faults))


if __name__ == "__main__":
    sys.exit(main())
