"""Write vLLM's share of the card for every run file of examples/ into docs/how-to/plan.md.

.venv/bin/python scripts/write_vllm_shares.py

tests/gpu_contract/test_memory.py holds the same numbers against Unsloth's arguments and vLLM's own
memory check.
"""

import os
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # a model whose config is on the hub alone is left out

from pages import with_part

from rloo_kit.config.run_file import EXAMPLES, read_run_file
from rloo_kit.errors import ModelError
from rloo_kit.machine.hardware import find_card
from rloo_kit.planning.facts import make_job, read_facts
from rloo_kit.planning.memory import plan_memory, planned_engine

PAGE = Path(__file__).resolve().parents[1] / "docs/how-to/plan.md"
CARDS = (8, 12, 16, 24)


def table() -> str:
    """Return the table: a row for each run file whose model's config is known here."""
    lines = [
        "| run file | " + " | ".join(f"{gib} GB" for gib in CARDS) + " |",
        "|---|" + "---|" * len(CARDS),
    ]
    for path in sorted(EXAMPLES.glob("*.yaml")):
        cells = _cells(path)
        if cells:
            lines.append(f"| `{path.stem}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(path: Path) -> list[str]:
    config = read_run_file(path, ())
    cells = []
    for gib in CARDS:
        card = find_card(f"{gib}GB")
        try:
            facts = read_facts(config, EXAMPLES, card, card.usable)
        except ModelError:  # its config is in a file that is fetched first, or on the hub
            return []
        job = make_job(config, replace(facts, vllm=True, unsloth=True))
        if job.engine != "shared":
            return []
        fits = plan_memory(job).peak_bytes <= card.usable
        cells.append(f"{planned_engine(job).share(card.usable):.3f}" if fits else "does not fit")
    return cells


def written(page: str) -> str:
    """Return the page with the table of now between its markers."""
    return with_part(page, "vllm_shares", table())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
