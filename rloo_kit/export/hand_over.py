"""``rloo-kit hand-over``: writes a folder with which verl repeats a run on several GPUs.

The folder contains verl's settings, the prompts, the rewards, a script that starts verl, and
HANDOVER.md, which says for each setting how it was carried over. No weights are read, and verl is
not imported.
"""

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rloo_kit import __version__
from rloo_kit.data.files import as_dataset
from rloo_kit.data.images import has_images
from rloo_kit.errors import ConfigError, DataError
from rloo_kit.export.exporter import PACKED_SUFFIX
from rloo_kit.export.verl_settings import ASSETS, Row, verl_rows
from rloo_kit.job import PreparedJob, read_config
from rloo_kit.models.adapters import base_name
from rloo_kit.models.loading import find_model
from rloo_kit.output_folder import check_writable, free_folder, whole_folder
from rloo_kit.text.redaction import redact_tree, redacting
from rloo_kit.text.wording import format_value, printable
from rloo_kit.types import Say

# Trainer settings that reward.py in the new folder reads
OF_SCORES = ("reward_weights", "on_reward_error", "reward_timeout_seconds", "missing_eos_penalty",
             "reward_clip_range", "max_completion_length", "chat_template_kwargs")  # fmt: skip


def hand_over(
    source: str | Path,
    to: str = "verl",
    *,
    output: str | Path,
    overrides: Sequence[str] = (),
    say: Say = print,
) -> Path:
    """Write the files that another trainer needs to train with the settings of a run file.

    Args:
        source: The run file, or the folder of a run.
        to: The other trainer. Only ``verl`` is supported.
        output: Folder to create. If it exists, a number is added to the name.
        overrides: Changes to the run file, each as ``section.key=value``.
        say: Function that is called with each line of output.

    Returns:
        The new folder.

    Raises:
        ConfigError: The trainer is unknown, the run has tools, a setting is wrong, or the folder
            cannot be created.
        DataError: The prompts are plain texts, have images, or cannot be read.
        ModelError: The model does not exist or cannot be read, or writing the folder fails.
        RewardLoadError: A reward cannot be found or imported.
    """
    if to != "verl":
        raise ConfigError(f"--to {format_value(to)} is unknown: give verl")
    goal = free_folder(output)
    check_writable(goal)
    config, base = read_config(source, overrides)
    if config.tools or config.environment:
        raise ConfigError(
            "verl has its own settings for tools, which the kit does not write: train with "
            "rloo-kit, or leave tools and environment out"
        )
    job = PreparedJob(config, base, redacting(say))
    job.prepare()
    train, held_out = job.splits
    if isinstance(train[0]["prompt"], str):
        raise DataError("verl needs chat prompts, but these are plain texts: set data.chat to true")
    if has_images(train):
        raise DataError(
            "only prompts of text can be handed over, but these have images: train with rloo-kit"
        )
    carried, lost = verl_rows(job)
    words = {
        "NAME": printable(str(source)),
        "VERSION": __version__,
        "MODEL": find_model(PACKED_SUFFIX.sub("", base_name(job.config.model.name))),
        "VALIDATION": "train" if held_out is None else "held_out",
        "CARRIED": "\n".join(_line(*row) for row in carried),
        "LOST": "\n".join(_line(row.run, row.note) for row in lost),
    }
    with whole_folder(goal) as folder:
        for file in ASSETS.glob("*.txt"):
            text = file.read_text(encoding="utf-8")
            text = re.sub(r"@([A-Z]+)@", lambda one: words[one[1]], text)
            (folder / file.stem).write_text(text, encoding="utf-8")
        _write_yaml(folder / "verl.yaml", _as_hydra_config(carried, goal.name))
        _write_rewards(folder, job)
        for split, rows in (("train", train), ("held_out", held_out)):
            if rows is not None:
                _write_prompts(folder / f"{split}.parquet", rows, job.config.data.prompts)
    job.say(
        f"written to {goal}: start it there with `bash run.sh` ({len(lost)} settings are not "
        "carried over, see HANDOVER.md)"
    )
    return goal


def _write_prompts(path: Path, rows: Iterable[dict[str, Any]], source: str) -> None:
    """Write prompts to a Parquet file in verl's format."""
    from pyarrow.parquet import write_table

    made = (
        {
            "data_source": printable(source),
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row.get("answer")},
            "extra_info": {"index": index, "split": path.stem, "columns": row},
        }
        for index, row in enumerate(rows)
    )
    write_table(as_dataset(made).data.table, path)


def _write_rewards(folder: Path, job: PreparedJob) -> None:
    """Write the files that the rewards need into the folder.

    These are ``rewards.yaml`` (the rewards and the settings that affect scores), copies of the
    user's own reward files, and the tokenizer.
    """
    config = job.config
    specs = {"rewards": config.rewards, "held_out_rewards": config.data.held_out_rewards}

    def copied(path: re.Match[str]) -> str:
        made = folder / "own_rewards" / f"{path.start()}_{Path(path[0]).name}"
        made.parent.mkdir(exist_ok=True)
        shutil.copyfile(path[0], made)
        return made.relative_to(folder).as_posix()

    text = json.dumps(specs, ensure_ascii=False)
    content = json.loads(re.sub(r'(?<=")/[^":]+\.py(?=[":])', copied, text))
    content |= {name: getattr(job.args, name) for name in OF_SCORES}
    content["trust_remote_code"] = config.model.trust_remote_code
    _write_yaml(folder / "rewards.yaml", content)
    job.tokenizer.save_pretrained(folder / "tokenizer")


def _as_hydra_config(rows: list[Row], name: str) -> dict[str, Any]:
    """Return a Hydra configuration for verl's ``ppo_trainer`` from the rows' settings.

    Dotted names become nested tables. ``name`` is the experiment's name.
    """
    found: dict[str, Any] = {
        "defaults": ["ppo_trainer", "_self_"],
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]},
    }
    for row in rows:
        for setting, value in row.verl.items():
            *tables, last = setting.split(".")
            inner = found
            for one in tables:
                inner = inner.setdefault(one, {})
            inner[last] = value
    found["trainer"]["experiment_name"] = name
    return found


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(redact_tree(content)))  # no tuples, no anchors in YAML
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")


def _line(*cells: dict[str, Any] | str) -> str:
    """Return one row of a Markdown table.

    A cell is either a text, or a dict of settings, which are shown one below the other.
    """
    texts = (
        one
        if isinstance(one, str)
        else "<br>".join(f"`{k}: {format_value(value)}`" for k, value in redact_tree(one).items())
        for one in cells
    )
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
