"""A real Chromium, and the folder of a run for it to look at."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from rloo_kit.report.page import write_report

STEPS = 20
GROUPS = 4
SIZE = 4
BETA = 0.05
TEXTS = ["Count the tens first: 4+5=9", "Carry the one", "Guess", "Check it twice: 6+6=12"]


def completion(step, group, place):
    """A text whose score depends on where it stands; later steps are right more often."""
    right = (7 * step + 5 * group + 3 * place) % 20 < step + 2 * (place % 2)
    thought = f"{TEXTS[place]} (try {step}.{group}.{place})\n</think>"
    return f"{thought}\n\n{step + group if right else 0}", float(right), len(thought)


def rows_of_group(step, group):
    found = [completion(step, group, place) for place in range(SIZE)]
    paid = [score + 0.1 - BETA * 0.1 * place for place, (_, score, _) in enumerate(found)]
    for place, (text, score, answer_at) in enumerate(found):
        baseline = (sum(paid) - paid[place]) / (SIZE - 1)
        yield {
            "step": step, "group": group,
            "prompt": [{"role": "system", "content": "Answer with a number."},
                       {"role": "user", "content": f"What is {step} + {group}?"}],
            "completion": [{"role": "assistant", "content": text}],
            "truncated": (step, group, place) == (7, 2, 1),
            "rewards": {"accuracy": score, "format": 1.0}, "score": score + 0.1, "kl": 0.1 * place,
            "baseline": baseline, "advantage": paid[place] - baseline,
            "tokens": 30 + place, "thought_tokens": 20 + place, "answer_at": answer_at,
        }  # fmt: skip


def metrics_of_step(step, groups):
    scores = [row["rewards"]["accuracy"] for group in groups for row in group]
    alike = [len({row["score"] for row in group}) == 1 for group in groups]
    return {
        "step": step, "time": 1.7e9 + 3 * step, "grad_norm": 0.2 + 0.01 * (step % 5),
        "reward": sum(scores) / len(scores) + 0.1, "score/raw_group_std": 0.3,
        "rewards/accuracy/mean": sum(scores) / len(scores), "rewards/format/mean": 1.0,
        "kl/sequence": 0.03 * step, "signal/groups_without": sum(alike) / len(alike),
        "completions/mean_length": 31.5, "completions/min_length": 30.0,
        "policy/entropy_avg": 0.5 - 0.01 * step, "my/own": float(step),
    }  # fmt: skip


def scored(share, num=24):
    samples = [
        {"prompt": f"What is {n} + 7?", "completion": f"{n} and 7 </think> {n + 7}",
         "rewards": {"accuracy": float(n < share * num), "format": 1.0}}
        for n in range(num)
    ]  # fmt: skip
    rewards = {"accuracy": share, "format": 1.0}
    return {"rewards": rewards, "num_prompts": num, "mean_length": 31.0, "samples": samples}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """Return a writer of folders of runs; ``change`` may change every row of a completion."""
    home = tmp_path_factory.mktemp("runs")

    def make(name, change=lambda row: row, **trainer):
        folder = home / name
        folder.mkdir()
        groups = [[list(rows_of_group(step, group)) for group in range(GROUPS)]
                  for step in range(1, STEPS + 1)]  # fmt: skip
        rows = [change(row) for step in groups for group in step for row in group]
        (folder / "completions.jsonl").write_text(jsonl(rows))
        metrics = [metrics_of_step(step, of) for step, of in enumerate(groups, 1)]
        (folder / "metrics.jsonl").write_text(jsonl(metrics))
        config = {"rewards": ["accuracy", "format:0.1"],
                  "trainer": {"beta": BETA, "learning_rate": 1e-3, **trainer}}  # fmt: skip
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        during = {"step": 10, "rewards": {"accuracy": 0.5}, "num_prompts": 24, "mean_length": 31.0}
        evaluation = {"before": scored(0.25), "during": [during], "after": scored(0.75)}
        (folder / "evaluation.json").write_text(json.dumps(evaluation))
        end = {"how": "stopped", "reason": "no signal in ten batches", "steps": STEPS}
        (folder / "end.json").write_text(json.dumps({**end, "seconds": 61.0, "time": 1.7e9 + 70}))
        return folder

    return make


@pytest.fixture(scope="session")
def first_run(make_run):
    return make_run("first")


@pytest.fixture(scope="session")
def single(first_run):
    """The page of one run."""
    return write_report(first_run)


@pytest.fixture(scope="session")
def compared(make_run, first_run, tmp_path_factory):
    """The page of two runs."""
    page = tmp_path_factory.mktemp("pages") / "both.html"
    return write_report([first_run, make_run("second", learning_rate=0.0005)], page)


@pytest.fixture(scope="session")
def chromium():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for switch in ("headless=new", "no-sandbox", "disable-dev-shm-usage"):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    yield driver
    driver.quit()


class Page:
    """A report in the browser."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path, *, width=1024, scheme="light", hash=""):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get("about:blank")
        self.logged()
        self.requested()
        self.driver.get(f"{path.as_uri()}{hash}")

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def keys(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def fill(self, name, value):
        """Put a value into a filter, as typing it does."""
        script = """const field = document.getElementById("filters").elements[arguments[0]];
            field.value = arguments[1];
            field.dispatchEvent(new Event("input", {bubbles: true}));"""
        self.run(script, name, value)

    def listed(self):
        """Step and group of every group in the list."""
        labels = self.run(
            "return [...document.querySelectorAll('#group-list button > span:first-child')]"
            ".map((label) => label.textContent)"
        )
        return [tuple(map(int, label.removeprefix("step ").split(" \u00b7 "))) for label in labels]

    def logged(self):
        """Messages of the console since it was last asked."""
        return [f"{entry['level']} {entry['message']}" for entry in self.driver.get_log("browser")]

    def requested(self):
        """Addresses that were asked for since this was last asked."""
        events = [json.loads(entry["message"])["message"] for entry in
                  self.driver.get_log("performance")]  # fmt: skip
        sent = [event for event in events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def violations(self, *rules):
        """What axe-core calls serious or critical: rule and the elements; of all rules, or some."""
        place = Path(find_spec("axe_playwright_python").submodule_search_locations[0])
        self.run((place / "axe.min.js").read_text(encoding="utf-8"))
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        found = self.driver.execute_async_script(
            "axe.run(document, arguments[0]).then(arguments[arguments.length - 1])", options
        )
        return [
            (one["id"], [node["target"] for node in one["nodes"]][:3])
            for one in found["violations"] if one["impact"] in ("serious", "critical")
        ]  # fmt: skip


@pytest.fixture
def page(chromium):
    return Page(chromium)
