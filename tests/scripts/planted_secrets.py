"""Plant secrets where a run meets them, run the command for real, and look for every one of them.

python planted_secrets.py [NUMBER] [--folder FOLDER] [--only RUN ...] [--no-hiding]

They are looked for in every byte of the folders that were written and of what the terminal got: as
they are, in JSON, percent-encoded, in base64, and cut off. Exits with 1 where one is found.
--no-hiding switches the hiding off, and most must be found then.
"""

import argparse
import base64
import http.server
import json
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

DICE = random.Random()
LETTERS = string.ascii_letters + string.digits

# --- secrets -------------------------------------------------------------------------------------


def some(length, letters=LETTERS):
    return "".join(DICE.choices(letters, k=length - 2)) + DICE.choice("456789") + DICE.choice("GKV")


KINDS = [
    lambda: some(32),
    lambda: f"{some(20)}/{some(10)}+{some(10)}=",
    lambda: f'{some(9)}"{some(6)}\\{some(6)}',
    lambda: f"{some(8)} é {some(8)} ß {some(8)}",
    lambda: f"{some(12)}<{some(6)}>&'{some(6)}",
    lambda: f"{DICE.choice(['correct', 'purple'])}-{some(10)}-staple",
]
"""Of which the kit knows that they are secrets because of where they stand."""
PLAIN_KINDS = KINDS[:1]
SHAPED_KINDS = [
    lambda: "hf_" + some(34),
    lambda: "sk-proj-" + some(40),
    lambda: "sk-ant-api03-" + some(40),
    lambda: "ghp_" + some(36),
    lambda: "github_pat_" + some(60),
    lambda: "glpat-" + some(20),
    lambda: "AIza" + some(35),
    lambda: f"eyJ{some(20)}.eyJ{some(40)}.{some(43)}",
]
"""That are known by their shape alone."""


@dataclass(frozen=True)
class Place:
    """Where secrets are planted."""

    name: str
    kinds: list = field(default_factory=lambda: KINDS)


PLACES = {
    "environment": Place("variables of the environment"),
    "dotenv": Place(".env"),
    "dotenv_second": Place(".env, where the environment has another value"),
    "address_in_environment": Place("password of an address in the environment", PLAIN_KINDS),
    "reward_setting": Place("run file: parameter of a reward"),
    "trainer_setting": Place("run file: nested setting of the trainer"),
    "set": Place("--set trainer.hub_token=", PLAIN_KINDS),
    "prompt": Place("prompts", SHAPED_KINDS),
    "printed": Place("what a reward prints, warns and logs", SHAPED_KINDS),
    "private_key": Place("a private key that a reward prints", [lambda: some(64)]),
    "raised": Place("what a reward raises", SHAPED_KINDS),
    "judge_key": Place("a judge's key that its server echoes", PLAIN_KINDS),
    "wrong_setting": Place("run file and --set that are refused"),
    "model_address": Place("model named by an address", PLAIN_KINDS),
    "data_address": Place("prompts named by an address", PLAIN_KINDS),
    "completions": Place("completions given to rewards check", SHAPED_KINDS),
    "reward_model": Place("pairs and hub_token of a reward model", SHAPED_KINDS),
    "card": Place("arguments, model card and log of TensorBoard", SHAPED_KINDS),
    "unforeseen": Place("traceback of an unforeseen error", SHAPED_KINDS),
}


def planted(number):
    """Return place -> its secrets, at least one each."""
    found = {place: [] for place in PLACES}
    for count in range(max(number, len(PLACES))):
        place = list(PLACES)[count % len(PLACES)]
        kinds = PLACES[place].kinds
        found[place].append(kinds[(count // len(PLACES)) % len(kinds)]())
    return found


# --- looking for them ----------------------------------------------------------------------------


def forms_of(secret):
    """Return the bytes that tell of a secret, with the name of the way it is written."""
    escaped = {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    twice = {json.dumps(text)[1:-1] for text in escaped}
    forms = {secret: "as it is", **dict.fromkeys(escaped | twice, "in JSON")}
    for text in (quote(secret), quote(secret, safe=""), quote(secret, safe="").lower()):
        forms.setdefault(text, "percent-encoded")
    for offset in range(3):
        text = base64.b64encode(b"\0" * offset + secret.encode()).decode().rstrip("=")
        forms.setdefault(text[4 * (offset > 0) : -2], "in base64")
    if len(secret) > 30:
        forms.setdefault(secret[:20], "cut off")
    return {form.encode(): way for form, way in forms.items()}


def texts_in(folder):
    """Yield (name, bytes) of every file, and of what is packed in it."""
    for path in sorted(folder.rglob("*")):
        yield str(path.relative_to(folder)), str(path.relative_to(folder)).encode()
        if not path.is_file():
            continue
        yield str(path.relative_to(folder)), path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as packed:
                for name in packed.namelist():
                    yield f"{path.relative_to(folder)}/{name}", packed.read(name)


def look(secrets, texts):
    """Return (place, secret, where, how it is written) of every secret that is found."""
    forms = [
        (place, secret, form, way)
        for place, each in secrets.items()
        for secret in each
        for form, way in forms_of(secret).items()
    ]
    found = {}
    for where, content in texts:
        for place, secret, form, way in forms:
            if form in content:
                found.setdefault((place, secret, where), way)
    return [(*key, way) for key, way in found.items()]


# --- what is run ---------------------------------------------------------------------------------

REWARDS = r"""
import base64, json, logging, os, sys, threading, urllib.parse, warnings
from pathlib import Path

TOLD = json.loads(Path(__file__).with_name("told.json").read_text())

def show(text):
    half = len(text) // 2
    print("reward:", text)
    print(text[:half], end="", flush=True)
    print(text[half:], flush=True)
    sys.stderr.write(text[:half])
    sys.stderr.flush()
    sys.stderr.write(text[half:] + "\n")
    warnings.warn(f"reward: {text}", UserWarning, stacklevel=1)
    for name in ("", "transformers", "huggingface_hub", "trl"):
        logging.getLogger(name).warning("reward: %s", text)

def fail_in_thread(text):
    def fail():
        raise RuntimeError(text)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()

def loud(completions, api_keys=(), log_metric=None, **_):
    known = [os.environ[name] for name in TOLD["variables"]] + TOLD["known"] + list(api_keys)
    for secret in known:
        for text in (secret, json.dumps(secret), repr(secret), urllib.parse.quote(secret)):
            show(text)
        show(base64.b64encode(f"user:{secret}".encode()).decode())
        if log_metric:
            log_metric(f"planted/{secret}", 1.0)
    for secret in TOLD["shaped"]:
        show(secret)
        show(json.dumps({"token": secret}))
        show(f"https://user:{secret}@example.org/x?token={secret}")
        fail_in_thread(f"thread: {secret}")
        if log_metric:
            log_metric(f"planted/{secret}", 1.0)
    for secret in TOLD["private_keys"]:
        for line in ("-----BEGIN PRIVATE KEY-----", secret, secret, "-----END PRIVATE KEY-----"):
            print(line)
    return [len(text_of(completion)) / 50 for completion in completions]

def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

calls = []

def failing(completions, **_):
    calls.append(1)
    if len(calls) > 1:
        try:
            raise KeyError(TOLD["raised"][0])
        except KeyError as exc:
            raise RuntimeError(" and ".join(TOLD["raised"])) from exc
    return [len(text_of(completion)) / 50 for completion in completions]
"""
CARD = r"""
import json, sys
from rloo_kit.text.redaction import hide_on_terminal
hide_on_terminal()
import rloo_kit as rk
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
print(args)
print(args.to_json_string())
trainer.train()
trainer.create_model_card(model_name="model", tags=["planted"])
"""
UNFORESEEN = r"""
import json, sys
from rloo_kit import cli
def fail(args):
    raise ZeroDivisionError(" and ".join(json.loads(open("unforeseen.json").read())))
cli._train = fail
sys.argv = ["rloo-kit", "quickstart"]
sys.exit(cli.main())
"""
NO_HIDING = r"""
from rloo_kit.text import redaction
redaction.redact = lambda text: text
redaction.redact_tree = lambda value, name="": value
"""


class Echo(http.server.BaseHTTPRequestHandler):
    """A judge's server that refuses everything, with what it was sent, in several ways."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        header = self.headers["Authorization"]
        key = header.removeprefix("Bearer ")
        basic = base64.b64encode(f"judge:{key}".encode()).decode()
        bodies = [header, json.dumps({"error": header}), f"key={quote(key, safe='')}", basic, key]
        body = bodies[self.server.asked % len(bodies)].encode()
        self.server.asked += 1
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Bench:
    """The folder that everything happens in, and what was written to the terminal."""

    def __init__(self, folder, secrets, *, hiding):
        self.folder, self.secrets = folder, secrets
        self.said = []
        self.faults = []
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder / "runs", ignore_errors=True)
        variables = {f"PLANTED_{i}_TOKEN": s for i, s in enumerate(secrets["environment"])}
        dotenv = {f"PLANTED_{i}_API_KEY": s for i, s in enumerate(secrets["dotenv"])}
        second = {f"PLANTED_{i}_SECRET": s for i, s in enumerate(secrets["dotenv_second"])}
        addresses = {
            f"PLANTED_{i}_URL": f"postgres://me:{quote(s, safe='')}@localhost/x"
            for i, s in enumerate(secrets["address_in_environment"])
        }
        self.variables = [*variables, *dotenv]
        quoted = {n: "'" + v.replace("\\", "\\\\").replace("'", "\\'") + "'"
                  for n, v in {**dotenv, **second}.items()}  # fmt: skip
        self.write(".env", "".join(f"{name}={value}\n" for name, value in quoted.items()))
        paths = [os.environ.get("PYTHONPATH", "")]
        if not hiding:
            self.write("no-hiding/sitecustomize.py", NO_HIDING)
            paths.insert(0, str(folder / "no-hiding"))
        self.environment = {
            **{n: v for n, v in os.environ.items() if not n.startswith("PLANTED_")},
            **variables, **addresses, **{name: some(30) for name in second},
            "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "RLOO_KIT_LIVE": "off", "PYTHONWARNINGS": "always::UserWarning",
        }  # fmt: skip

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def rows(self, name, rows):
        self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def run_file(self, name, **changes):
        """Write a run file, which is YAML too as JSON."""
        content = {
            "model": {"name": "tiny-thinker", "max_seq_length": 1024},
            "data": {"prompts": "prompts.jsonl", "held_out": 2},
            "rewards": ["accuracy"],
            "output_dir": f"runs/{name}",
        }
        trainer = {
            "max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4,
            "max_completion_length": 16, "save_steps": 1, "report_to": ["tensorboard"],
            **changes.pop("trainer", {}),
        }  # fmt: skip
        self.write(f"{name}.yaml", {**content, **changes, "trainer": trainer})

    def run(self, *arguments, code=0, program=("-m", "rloo_kit")):
        began = time.monotonic()
        result = subprocess.run(
            [sys.executable, *program, *arguments], cwd=self.folder, env=self.environment,
            capture_output=True, timeout=1500,
        )  # fmt: skip
        name = " ".join(arguments)[:40] or f"program {len(self.said)}"
        self.said += [(f"stdout of {name}", result.stdout), (f"stderr of {name}", result.stderr)]
        print(f"{time.monotonic() - began:5.0f} s  exit {result.returncode}  {name}", flush=True)
        if result.returncode != code:
            told = result.stderr.decode(errors="replace")[-600:]
            self.faults.append(f"{name} ended with {result.returncode}, expected {code}: {told}")

    def expect(self, *paths):
        self.faults += [f"{p} was not written" for p in paths if not (self.folder / p).exists()]

    def texts(self):
        yield from texts_in(self.folder / "runs")
        yield from self.said


def write_inputs(bench):
    """The rewards and the prompts of the runs."""
    secrets = bench.secrets
    known = [*secrets["address_in_environment"], *secrets["dotenv_second"], *secrets["set"]]
    told = {"variables": bench.variables, "known": known + secrets["trainer_setting"],
            "shaped": secrets["printed"], "private_keys": secrets["private_key"],
            "raised": secrets["raised"]}  # fmt: skip
    bench.write("rewards.py", REWARDS)
    bench.write("told.json", told)
    shown, in_all = [*secrets["environment"], *secrets["dotenv"]], " ".join(secrets["prompt"])
    bench.rows("prompts.jsonl", [
        {"prompt": f"What is {n} + 1? {in_all} {shown[n % len(shown)]}", "answer": str(n + 1)}
        for n in range(max(20, len(shown)))
    ])  # fmt: skip


def healthy(bench):
    """A run that ends well, whose reward shows all it can; then its doctor and its report."""
    secrets = bench.secrets
    nested = secrets["trainer_setting"]
    tables = {"more": {"api_key": nested[0]}, "password": nested}
    bench.run_file(
        "healthy",
        rewards=["accuracy", {"name": "rewards.py:loud", "api_keys": secrets["reward_setting"]}],
        trainer={"chat_template_kwargs": tables},
        data={"prompts": "prompts.jsonl", "held_out": 2, "system": f"Say {secrets['dotenv'][0]}."},
    )
    sets = [part for s in secrets["set"] for part in ("--set", f"trainer.hub_token={s}")]
    bench.run("train", "healthy.yaml", *sets)
    bench.expect("runs/healthy/adapter/README.md", "runs/healthy/report.html", "runs/healthy/runs")
    bench.run("doctor", "runs/healthy", code=1)
    bench.run("report", "runs/healthy")


def failing(bench):
    """A run whose reward raises in its second step; and the report of what it left."""
    bench.run_file(
        "failing", rewards=["rewards.py:failing"], data={"prompts": "prompts.jsonl", "held_out": 0}
    )
    bench.run("train", "failing.yaml", code=2)
    bench.expect("runs/failing/end.json", "runs/failing/metrics.jsonl")


def judged(bench):
    """A run whose judge's server echoes the key."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    server.asked = 0
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judges = []
    for number, key in enumerate(bench.secrets["judge_key"]):
        bench.environment[f"JUDGE_{number}"] = key
        judges.append({
            "name": "judge", "model": "m", "base_url": f"http://127.0.0.1:{server.server_port}/v1",
            "api_key_env": f"JUDGE_{number}", "on_failure": "skip", "rubric": f"no {number}",
            "extra_body": {"metadata": {"api_key": key}},
        })  # fmt: skip
    rewards = ["accuracy", *judges[:1], *({**j, "name": "judge"} for j in judges[1:])]
    bench.run_file("judged", rewards=rewards, data={"prompts": "prompts.jsonl", "held_out": 0},
                   trainer={"max_steps": 1})  # fmt: skip
    bench.run("train", "judged.yaml")
    bench.expect("runs/judged/metrics.jsonl")
    if not server.asked:
        bench.faults.append("the judge was not asked")
    server.shutdown()


def refused(bench):
    """Input that is refused with a message that names it."""
    wrong = bench.secrets["wrong_setting"]
    bench.run_file("refused", rewards=[
        {"name": "length", "api_key": s, "password": [s]} for s in wrong
    ], trainer={"hub_tokn": wrong[0], "loss": {"api_key": wrong[-1]}})  # fmt: skip
    sets = [part for s in wrong for part in ("--set", f"model.name.api_key={s}")]
    bench.run("train", "refused.yaml", code=2)
    bench.run("train", "quickstart", *sets, code=2)
    bench.run_file("rewards-refused", rewards=[{"name": "length", "api_key": s} for s in wrong])
    bench.run("train", "rewards-refused.yaml", code=2)
    address = "https://me:{}@example.org/{}/x?token={}"
    for secret in bench.secrets["model_address"]:
        bench.run("train", "quickstart", "--set", f"model.name={address.format(secret, 1, secret)}",
                  code=2)  # fmt: skip
        break
    for secret in bench.secrets["data_address"]:
        bench.run("train", "quickstart", "--set",
                  f"data.prompts={address.format(secret, 1, secret)}.jsonl", code=2)  # fmt: skip
        break


def checked(bench):
    """The reward lab, without a model."""
    secrets = bench.secrets["completions"]
    bench.rows("completions.jsonl", [
        {"prompt": f"What is {n % 4} + 1? {secrets[n % len(secrets)]}", "group": n % 4, "step": 1,
         "completion": f"it is {n} {secrets[n % len(secrets)]}", "answer": str(n % 4 + 1)}
        for n in range(16)
    ])  # fmt: skip
    bench.write("lab.py", "def length(completions, **_):\n    print(completions[0])\n"
                "    return [len(str(c)) / 100 for c in completions]\n")  # fmt: skip
    bench.run_file("lab", rewards=["lab.py:length"], data={"prompts": "completions.jsonl"})
    bench.run("rewards", "check", "lab.yaml", "--completions", "completions.jsonl",
              "--output-dir", "runs/lab")  # fmt: skip
    bench.expect("runs/lab/completions.jsonl")


def learnt(bench):
    """A reward model."""
    secrets = bench.secrets["reward_model"]
    bench.rows("pairs.jsonl", [
        {"prompt": f"What is {n}?", "chosen": f"{n} {secrets[n % len(secrets)]}", "rejected": "no"}
        for n in range(24)
    ])  # fmt: skip
    bench.run("reward-model", "train", "pairs.jsonl", "--output-dir", "runs/reward-model",
              "--set", "max_steps=1", "--set", f"hub_token={secrets[0]}")  # fmt: skip
    bench.expect("runs/reward-model/reward_model.json")


def programs(bench):
    """A program of one's own, and an error that nobody foresaw."""
    bench.write("card.json", bench.secrets["card"])
    bench.run(program=("-c", CARD))
    bench.expect("runs/card/README.md", "runs/card/runs")
    bench.write("unforeseen.json", bench.secrets["unforeseen"])
    bench.run(program=("-c", UNFORESEEN), code=1)


RUNS = {run.__name__: run for run in (healthy, failing, judged, refused, checked, learnt, programs)}


def table(secrets, found):
    """Print place, planted, found."""
    lost = Counter(place for place, _ in {(place, secret) for place, secret, *_ in found})
    print(f"\n{'where it was planted':<48} planted  found")
    for place, each in secrets.items():
        print(f"{PLACES[place].name:<48} {len(each):>7}  {lost[place]:>5}")
    print(f"{'all ' + str(len(PLACES)) + ' places':<48} "
          f"{sum(map(len, secrets.values())):>7}  {sum(lost.values()):>5}")  # fmt: skip
    files = Counter((PLACES[place].name, where) for place, _, where, _ in found)
    for (place, where), number in files.most_common(40):
        print(f"  {number} of {place} in {where}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="kept; a temporary one where it is not given")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--no-hiding", action="store_true")
    parser.add_argument("--show", action="store_true", help="what the terminal got")
    args = parser.parse_args()
    secrets = planted(args.number)
    with tempfile.TemporaryDirectory(prefix="planted-") as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        bench = Bench(folder, secrets, hiding=not args.no_hiding)
        write_inputs(bench)
        for name in args.only:
            RUNS[name](bench)
        found = look(secrets, bench.texts())
        size = sum(len(content) for _, content in bench.texts())
    if args.show:
        for name, content in bench.said:
            print(f"--- {name}\n{content.decode(errors='replace')}")
    table(secrets, found)
    hidden = sum(content.count(b"[hidden") for _, content in bench.said)
    print(f"looked through {size / 2**20:.0f} MiB; {hidden} marks on the terminal")
    print("\n".join(f"fault: {fault}" for fault in bench.faults))
    return int(bool(found or bench.faults))


if __name__ == "__main__":
    sys.exit(main())
