"""Write the numbers of docs/tutorials/smollm2.md, from a run of examples/smollm2.yaml.

.venv/bin/python scripts/update_smollm2.py runs/smollm2   # saves the run's results, writes the page
.venv/bin/python scripts/update_smollm2.py                # writes the page from the saved results

The results are saved in benchmarks/results/smollm2_cpu.json: the scores and completions of every
held-out post, and the results of `rloo-kit eval runs/smollm2 --samples 0`, if it was called before.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

from pages import with_part
from rloo_kit.rewards import Rouge

from rloo_kit.evaluation.statistics import Difference, difference, estimate

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "smollm2_cpu.json"
PAGE = ROOT / "docs" / "tutorials" / "smollm2.md"
POSTS = ROOT / "examples" / "posts.jsonl"
JUDGE = "rouge"
PARTS = ("before", "after")  # before and after the training
# Number of held-out posts whose completions are shown, evenly spread and not selected
SHOWN = 1


def kept(run: Path) -> dict:
    """Return the results of a run that the page needs, to be saved as JSON."""
    evaluation = json.loads((run / "evaluation.json").read_text())
    hardware = json.loads((run / "environment.json").read_text())["hardware"]
    return {
        "greedy": greedy(run / "eval.json"),
        "device": hardware["name"],
        "steps": json.loads((run / "end.json").read_text())["steps"],
        "temperature": evaluation["before"]["temperature"],
        **{
            part: [
                {"completion": one["completion"], "rewards": one["rewards"]}
                for one in evaluation[part]["samples"]
            ]
            for part in PARTS
        },
    }


def greedy(file: Path) -> dict | None:
    """Return the scores of greedy answers from ``rloo-kit eval``, or None if it was not called.

    ``means`` are the mean scores of the base and of the run, and ``found`` is their difference.
    """
    if not file.is_file():
        return None
    newest = json.loads(file.read_text())["evaluations"][-1]
    means = [row["rewards"][JUDGE] for row in newest["rows"] if row["mode"] == "greedy"]
    (found,) = [
        one["found"]
        for one in newest["compared"]
        if (one["mode"], one["reward"]) == ("greedy", JUDGE)
    ]
    return {"means": means, "found": found}


def scores(content: dict, part: str, name: str) -> list[float]:
    """Return one score for each held-out post, in order.

    Args:
        content: Saved results.
        part: ``before`` or ``after`` the training.
        name: Name of a reward, or ``words`` for the number of words.
    """
    if name == "words":
        return [float(len(one["completion"].split())) for one in content[part]]
    return [one["rewards"][name] for one in content[part]]


def by_situation(values: list[float], posts: list[dict]) -> list[float]:
    """Return the mean value of each situation.

    Posts about the same situation are similar, so their values are not independent.
    """
    groups: dict[int, list[float]] = {}
    for value, post in zip(values, posts, strict=True):
        groups.setdefault(post["situation"], []).append(value)
    return [statistics.fmean(group) for group in groups.values()]


def about_the_post(content: dict, part: str, posts: list[dict]) -> list[float]:
    """Return how much higher each answer scores with its own reference than with other references.

    The other references are those of posts about other situations. The score with these measures
    the form of an answer only, not its content.
    """
    found = []
    for own, one, post in zip(scores(content, part, JUDGE), content[part], posts, strict=True):
        others = [o["reference"] for o in posts if o["situation"] != post["situation"]]
        texts = [one["completion"]] * len(others)
        with_others = Rouge()(completions=texts, prompts=texts, reference=others)
        found.append(own - statistics.fmean(with_others))
    return found


def interval(found: Difference) -> str:
    """Return the text of a table cell: a difference, its interval, and its p-value.

    The p-value is left out if it is less than 0.001.
    """
    p = "" if found.p_value < 0.001 else f", p = {found.p_value:.3f}"
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]{p}"


def table(content: dict, posts: list[dict]) -> str:
    """Return a Markdown table with the means before and after, and the paired differences."""
    lines = [
        f"| {len(posts)} held-out posts | before | after "
        "| difference, 95% interval; p < 0.001 unless given |",
        "|---|---|---|---|",
    ]
    names = {
        JUDGE: "**judge**: ROUGE-L F1 against the reference",
        "coverage": "paid: words from the post, of an answer of 6 to 20 words",
        "format": "paid: one sentence in the first person",
        "words": "words of an answer",
    }
    found = {
        title: [scores(content, part, name) for part in PARTS] for name, title in names.items()
    }
    found["judge, minus the mean score with references of other situations"] = [
        about_the_post(content, part, posts) for part in PARTS
    ]
    found["judge, by situation (12 means)"] = [
        by_situation(values, posts) for values in found[names[JUDGE]]
    ]
    for title, twice in found.items():
        means = [f"{statistics.fmean(values):.3f}" for values in twice]
        lines.append(f"| {title} | {' | '.join(means)} | {interval(difference(*twice))} |")
    if content["greedy"]:
        means = [f"{mean:.3f}" for mean in content["greedy"]["means"]]
        cell = interval(Difference(**content["greedy"]["found"]))
        lines.append(f"| judge, of greedy answers | {' | '.join(means)} | {cell} |")
    return "\n".join(lines)


def yardsticks(posts: list[dict]) -> str:
    """Return a Markdown table with the judge's scores of texts that no model wrote.

    They show which scores are easy to reach.
    """

    def sentence(post: dict, number: int) -> str:
        story = post["post"].partition("\n\n")[2]
        return re.split(r"(?<=[.!?]) ", story)[number]

    texts = {
        "the first sentence of the post": [sentence(post, 0) for post in posts],
        "the second sentence": [sentence(post, 1) for post in posts],
        "the title": [post["post"].partition("\n\n")[0] for post in posts],
        "the whole post": [post["post"] for post in posts],
        "the reference of the post after next": [
            post["reference"] for post in posts[2:] + posts[:2]
        ],
    }
    references = {"prompts": [""] * len(posts), "reference": [post["reference"] for post in posts]}
    lines = ["| in the place of an answer | judge, 95% interval |", "|---|---|"]
    for title, given in texts.items():
        lines.append(f"| {title} | {estimate(Rouge()(completions=given, **references))} |")
    return "\n".join(lines)


def samples(content: dict, posts: list[dict]) -> str:
    """Return a few posts as Markdown, with the model's answers before and after the training."""
    lines = []
    for place in range(0, len(posts), len(posts) // SHOWN):
        text = " ".join(posts[place]["post"].split())
        lines.append(f"> {text}\n>\n> reference: {posts[place]['reference']}\n>")
        for part in PARTS:
            one = content[part][place]
            text = " ".join(re.sub(r"([\\`*_<>\[\]|#])", r"\\\1", one["completion"]).split())
            lines.append(f"> {part} ({one['rewards'][JUDGE]:.2f}): {text}\n>")
        lines[-1] = lines[-1].removesuffix("\n>") + "\n"
    return "\n".join(lines).rstrip()


def written(page: str, content: dict) -> str:
    """Return the page with all of its generated parts replaced."""
    held_out = len(content["before"])
    posts = [json.loads(line) for line in POSTS.read_text().splitlines()][-held_out:]
    parts = {
        "numbers": table(content, posts),
        "yardsticks": yardsticks(posts),
        "samples": samples(content, posts),
    }
    for name, text in parts.items():
        page = with_part(page, name, f"\n{text}\n")
    return page


def main() -> None:
    """Save the results of the run, if one is given, and write the page."""
    parser = argparse.ArgumentParser(description="Write the numbers of docs/tutorials/smollm2.md.")
    parser.add_argument(
        "run", nargs="?", type=Path, help="folder of a run of examples/smollm2.yaml"
    )
    run = parser.parse_args().run
    if run is not None:
        RESULTS.write_text(json.dumps(kept(run), ensure_ascii=False, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
