"""The Markdown of a GPU acceptance result; written from its JSON alone.

python benchmarks/gpu_report.py benchmarks/results/gpu_acceptance_CARD.json
"""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

GIB = 2**30
PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/gpu_acceptance.md"
ON_THE_PAGE = "gpu_acceptance_nvidia-h100-80gb-hbm3.json"
BEGIN, END = "<!-- h100: written by benchmarks/gpu_report.py -->\n", "<!-- /h100 -->"
PLANNER = (
    ("card", "card", "{} GB"),
    ("predicted", "predicted", "gib"),
    ("measured", "measured", "gib"),
    ("ratio", "predicted / measured", "{:.2f}"),
    ("allocated", "by tensors", "gib"),
    ("context", "context", "gib"),
    ("rows", "completions", "{}"),
    ("length", "of tokens", "{}"),
    ("seconds", "s", "{:.0f}"),
)


def markdown(content: dict) -> str:
    """Return the whole page."""
    card = content["card"] or "a CPU (no GPU: what needs one is skipped by name)"
    statuses = [row["status"] for row in content["parts"]]
    counts = ", ".join(f"{statuses.count(s)} {s}" for s in ("passed", "skipped", "failed"))
    toy = (
        " **Tiny models in the place of all: the numbers mean nothing.**" if content["toy"] else ""
    )
    sections = [
        f"# GPU acceptance on {card}",
        f"{content['date']}, torch {content['torch']}, {content['seconds']:.0f} s: {counts}.{toy}",
        f"`{content['command'].strip()}`",
        content.get("note", ""),
        _table(
            ("part", "", "s", "why"),
            (
                (_title(row), row["status"], f"{row['seconds']:.0f}", row.get("reason", ""))
                for row in content["parts"]
            ),
        ),
        *(text for show in SECTIONS for text in _shown(show, content["parts"])),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _shown(show: Callable[[list[dict]], list[str]], parts: list[dict]) -> list[str]:
    try:
        return show(parts)
    except Exception as exc:  # numbers of an unexpected form must not cost the others their page
        return [f"{show.__name__} cannot be shown ({type(exc).__name__}: {exc}): see the JSON."]


def _title(row: dict) -> str:
    return f"{row['family']}: {row['name']}"


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    return "\n".join(lines) if len(lines) > 2 else ""


def _cell(value: object) -> str:
    text = "" if value is None else str(value)
    return text.replace("\n", " ").replace("|", "\\|")[:300]


def _of(parts: list[dict], family: str) -> list[dict]:
    return [row for row in parts if row["family"] == family and row.get("data")]


def _environment(parts: list[dict]) -> list[str]:
    found = []
    for row in _of(parts, "environment"):
        data = dict(row["data"])
        doctor, packages = data.pop("doctor", None), data.pop("packages", {})
        found += ["## Environment", _table(("", ""), data.items())]
        found.append(_table(("package", "installed"), packages.items()))
        if doctor:
            found.append(f"```text\n{doctor.strip()}\n```")
    return found


def _tests(parts: list[dict]) -> list[str]:
    rows = []
    for row in parts:
        for test in row.get("tests", ()):
            measured = ", ".join(f"{k} {v}" for k, v in (test.get("measured") or {}).items())
            detail = "; ".join(str(text) for text in (test.get("reason"), measured) if text)
            rows.append((row["name"], test["name"], test["status"], test.get("seconds"), detail))
    return ["## Tests", _table(("", "test", "", "s", "measured, or why not"), rows)] if rows else []


def _planner(parts: list[dict]) -> list[str]:
    rows = []
    for row in _of(parts, "planner"):
        data = row["data"]
        cells = [data.get("model", row["name"])]
        for name, _, form in PLANNER:
            value = data.get(name)
            if value is None:
                cells.append("")
            elif form == "gib":
                cells.append(f"{value / GIB:.2f} GiB")
            else:
                cells.append(form.format(value))
        cells.append({True: "yes", False: "no", None: ""}[data.get("fits")])
        rows.append(cells)
    head = ("model", *(title for _, title, _ in PLANNER), "planned to fit")
    text = (
        "Memory capped by `torch.cuda.set_per_process_memory_fraction`, and the card's size as the "
        "kit sees it likewise. Measured: the most that torch's allocator reserved, and the context."
    )
    return ["## The planner against measured peaks", text, _table(head, rows)] if rows else []


def _cards(parts: list[dict]) -> list[str]:
    """Trainings with vLLM on cards made small: the share, and the peak that the driver counted."""
    rows = []
    for row in _of(parts, "cards"):
        data = row["data"]
        for number in (1, 2):
            run = data.get(f"run_{number}")
            if not run:
                continue
            last = run["metrics"][-1] if run["metrics"] else {}
            rows.append(
                (
                    row["name"],
                    number,
                    data.get("planned_share"),
                    run.get("share"),
                    f"{data['predicted'] / GIB:.2f} GiB",
                    f"{run['peak'] / GIB:.2f} GiB",
                    f"{run.get('cache_tokens', 0):,}",
                    run.get("start_seconds"),
                    f"{last.get('speed/generation_tokens_per_second', 0):,.0f}",
                    f"{last.get('speed/learning_tokens_per_second', 0):,.0f}",
                    f"{last.get('sampling/logp_difference_mean', 0):.4f}",
                    f"{run['left_after_release'] / GIB:.2f} GiB",
                )
            )
    head = ("training", "run", "share planned", "share of the engine", "peak planned",
            "peak measured", "tokens in the cache", "start s", "tokens/s sampled",
            "tokens/s learned", "sampler off by (nats)", "left after release")  # fmt: skip
    text = (
        "Every library sees a card of that size; torch's allocator is limited to it. The peak is "
        "what the driver counts for the process, vLLM's own allocations included."
    )
    return ["## vLLM on small cards", text, _table(head, rows)] if rows else []


def card_table(content: dict) -> str:
    """Return the table of docs/how-to/gpu_acceptance.md: the first training of each real shape."""
    rows = []
    for row in _of(content["parts"], "cards"):
        run = row["data"].get("run_1")
        if not run or row["name"].startswith("toy"):
            continue
        last = run["metrics"][-1]
        rows.append(
            (
                row["name"],
                f"{row['data']['planned_share']}, {run['share']}",
                f"{row['data']['predicted'] / GIB:.1f}, {run['peak'] / GIB:.1f} GiB",
                f"{last['sampling/logp_difference_mean']:.3f}, "
                f"{last['sampling/rounding_noise']:.3f}",
            )
        )
    head = ("training", "vLLM's share: planned, in the engine", "peak: planned, measured",
            "nats a token: sampler and trainer differ, rounding")  # fmt: skip
    return _table(head, rows)


def written(page: str, content: dict) -> str:
    """Return docs/how-to/gpu_acceptance.md with the table of a result between its markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{card_table(content)}\n{END}{rest.split(END)[1]}"


def _speed(parts: list[dict]) -> list[str]:
    found = []
    for row in _of(parts, "speed"):
        data = row["data"]
        lines = [
            (
                f"training, {cell['rows']} completions of {cell['length']} tokens",
                f"{cell['tokens_per_second']:.0f}",
                f"{cell['seconds']:.2f}",
                f"{cell['peak'] / GIB:.2f} GiB",
            )
            for cell in data.get("training", ())
        ]
        if "sampling" in data:
            cell = data["sampling"]
            lines.append(
                (
                    f"sampling by transformers, {cell['rows']} at a time",
                    f"{cell['tokens_per_second']:.0f}",
                    f"{cell['seconds']:.2f}",
                    "",
                )
            )
        found += [
            f"## Tokens a second: {data.get('model')}, {data.get('weights')}, LoRA 16",
            "Training: prompt and completion tokens over the seconds of a learning step, its "
            "reference pass included, sampling not.",
            _table(("", "tokens/s", "s a step", "peak"), lines),
        ]
    return found


def _learn_step(parts: list[dict]) -> list[str]:
    rows = []
    for row in _of(parts, "learn-step"):
        data = row["data"]
        for cell in data.get("rows", ()):
            rows.append(
                (
                    data.get("against"),
                    cell["cell"],
                    f"{cell['seconds_trl']:.2f}",
                    f"{cell['seconds_kit']:.2f}",
                    f"{cell['time_ratio']:.2f}x",
                    f"{cell['peak_ratio']:.2f}x",
                    f"{cell['gradient_difference']:.0e}",
                )
            )
    head = ("against", "lengths/signal/beta/iterations", "TRL s", "kit s", "faster", "memory",
            "gradient differs by")  # fmt: skip
    return ["## The learning step", _table(head, rows)] if rows else []


def _generation(parts: list[dict]) -> list[str]:
    found = []
    for row in _of(parts, "generation"):
        data = row["data"]
        rows = [
            (
                cell["lengths"],
                f"{cell['tokens_per_second_transformers']:.0f}",
                f"{cell['tokens_per_second_kit']:.0f}",
                f"{cell['ratio']:.1f}x",
            )
            for cell in data.get("rows", ())
        ]
        if rows:
            head = ("lengths", "transformers tokens/s", "vLLM tokens/s", "faster")
            found += [f"### {row['name']}", _table(head, rows)]
        if "tokens_per_second" in data:
            text = ", ".join(f"{name} {value}" for name, value in data.items())
            found += [f"### {row['name']}", text]
    return ["## Generation", *found] if found else []


def _logs(parts: list[dict]) -> list[str]:
    failed = [row for row in parts if row.get("log")]
    found = ["## What failed said last"] if failed else []
    for row in failed:
        tail = "\n".join(row["log"].splitlines()[-40:])
        found += [f"### {_title(row)}", f"```text\n{tail}\n```"]
    return found


SECTIONS = (_environment, _tests, _cards, _planner, _speed, _learn_step, _generation, _logs)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    found = json.loads(source.read_text())
    source.with_suffix(".md").write_text(markdown(found))
    if source.name == ON_THE_PAGE:
        PAGE.write_text(written(PAGE.read_text(), found))
