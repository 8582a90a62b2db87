"""Write the memory that training on several cards needs into docs/how-to/more_than_one_card.md.

.venv/bin/python scripts/write_card_ways.py

The numbers are estimates of the planner. A "way" is a way to use several cards, such as DDP.
"""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from pages import with_part

from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.machine.hardware import GIB, find_card
from rloo_kit.planning.cards import find_ways
from rloo_kit.planning.facts import make_job, read_facts
from rloo_kit.planning.memory import Job

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/more_than_one_card.md"
RUN_FILE = "qwen3-14b-24gb"  # batch, lengths and adapter, for other base models
SETTINGS = ["trainer.tokens_per_micro_batch=2048"]  # one longest row per pass: the least memory
SETUPS = {
    "2 x 24 GB": (2, 24),
    "4 x 24 GB": (4, 24),
    "8 x 24 GB": (8, 24),
    "2 nodes, 8 x 24 GB": (16, 24),
}
LARGE = {"8 x 80 GB": (8, 80)}
# Words in the planner's name of a way -> its name on the page, which explains it
SHORT = {"(DDP)": "DDP", "server": "vLLM's server"}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Values of the published config.json: those of NAMES, model type, key-value heads, vocabulary
BASES = {
    "14B (Qwen3-14B)": (5120, 17408, 40, 40, "qwen3", 8, 151_936),
    "32B (Qwen3-32B)": (5120, 25600, 64, 64, "qwen3", 8, 151_936),
    "70B (Llama-3.3-70B)": (8192, 28672, 80, 64, "llama", 8, 128_256),
}


def job_of(base: str, gib: int) -> Job:
    """Return the planner's job for the run file with another base model.

    Args:
        base: Key of the base model in ``BASES``.
        gib: Memory of one card in GiB.
    """
    *sizes, kind, heads, tokens = BASES[base]
    config = dict(zip(NAMES, sizes, strict=True))
    config |= {"model_type": kind, "num_key_value_heads": heads, "vocab_size": tokens}
    config |= {"head_dim": 128, "tie_word_embeddings": False}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        run = read_run_file(RUN_FILE, [f"model.name={folder}", *SETTINGS])
        card = find_card(f"{gib}GB")
        facts = read_facts(run, EXAMPLES, card, card.usable)
    return make_job(run, replace(facts, vllm=False, unsloth=True))


def cells(base: str, setups: dict[str, tuple[int, int]]) -> dict[str, list[str]]:
    """Return table cells: name of a way -> peak memory in GiB for each set of cards.

    The number is bold if the job fits on the cards.
    """
    found: dict[str, list[str]] = {}
    for cards, gib in setups.values():
        job = job_of(base, gib)
        for way, peak in find_ways(job, cards).items():
            size = f"{peak / GIB:.1f}"
            (name,) = [short for words, short in SHORT.items() if words in way] or [way]
            found.setdefault(name, []).append(f"**{size}**" if peak <= job.room else size)
    return found


def table(base: str) -> str:
    """Return the Markdown table of a base model, with a row for each way of using several cards.

    Each column is a set of cards.
    """
    lines = [f"| {base} | {' | '.join(SETUPS)} |", "|---" * (1 + len(SETUPS)) + "|"]
    lines += [f"| {name} | {' | '.join(sizes)} |" for name, sizes in cells(base, SETUPS).items()]
    return "\n".join(lines)


def misses(base: str, setups: dict[str, tuple[int, int]]) -> list[str]:
    """Return a text for each way and set of cards with which a base model does not fit."""
    return [
        f"{name.partition(':')[0]} on {setup} ({size} GiB)"
        for name, sizes in cells(base, setups).items()
        for setup, size in zip(setups, sizes, strict=True)
        if "*" not in size
    ]


def sentences(smallest: str, others: list[str]) -> str:
    """Return the sentences about what has no table: the smallest base model, the largest cards.

    Raises:
        ValueError: A base model does not fit on the largest cards.
    """
    if any(misses(base, LARGE) for base in others):
        raise ValueError(f"{', '.join(LARGE)} needs a column: not every way fits")
    exceptions = ", ".join(misses(smallest, SETUPS | LARGE))
    return (
        f"On {', '.join(LARGE)} every way fits. {smallest} fits in every way on all these cards, "
        f"except with {exceptions}."
    )


def written(page: str) -> str:
    """Return the page with new tables between its markers."""
    smallest, *others = BASES
    text = "\n\n".join([*map(table, others), sentences(smallest, others)])
    return with_part(page, "card_ways", text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
