"""The page ``report.html``, which shows a run's progress, its faults and what to change.

The page contains its styles, its scripts, a plotting library and the data. A browser loads nothing
else, because the page's content security policy forbids it.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import read_run
from rloo_kit.errors import DataError, DiskError
from rloo_kit.live.series import Chart
from rloo_kit.machine.hardware import installed_version
from rloo_kit.output_folder import without_nan, write_atomically
from rloo_kit.report.content import run_content
from rloo_kit.report.curves import charts_of
from rloo_kit.text.wording import printable

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
STYLES = ("uPlot.min.css", "report.css")
LIBRARY = "uPlot.iife.min.js"
# These files are joined to one script, so that each may use names from the files before it
SCRIPTS = ("parts.js", "curves.js", "groups.js", "report.js")
# Placeholders in page.html. They are filled in one pass, so that inserted data is not searched.
PLACE = re.compile(r"\{\{(\w+)\}\}")


def write_report(
    folders: str | Path | Sequence[str | Path],
    path: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the report of a run, or a comparison of several runs, as one HTML page.

    The file is replaced atomically.

    Args:
        folders: One or more run folders. A run may still be training.
        path: Path of the page. None means ``report.html`` in the folder of a single run, or
            ``comparison.html`` in the current folder for several runs.
        say: Function that is called with the verdict on each run.

    Returns:
        The path of the page.

    Raises:
        DataError: A folder is not a run folder, the path does not end in .html, or the page cannot
            be written.
    """
    given = [*map(Path, [folders] if isinstance(folders, str | Path) else folders)]
    target = _target(given, path)
    records = [read_run(folder) for folder in given]
    charts = charts_of(records)
    runs = [
        run_content(record, name, charts, len(records))
        for record, name in zip(records, _names(given), strict=True)
    ]
    page = _page(charts, runs).encode("utf-8", "replace")  # texts may contain a lone surrogate
    try:
        write_atomically(target, page)
    except DiskError as exc:
        raise DataError(
            f"the report cannot be written to {str(target)!r} ({exc.__cause__}): give another path"
        ) from exc
    for run in runs:
        say(run["verdict"] if len(runs) == 1 else f"{run['name']}: {run['verdict']}")
    return target


def _page(charts: Sequence[Chart], runs: Sequence[dict[str, Any]]) -> str:
    """Return the HTML text of the page for one run, or for several runs side by side."""
    content = {
        "version": installed_version("rloo_kit"),
        "charts": [asdict(chart) for chart in charts],
        "runs": runs,
    }
    title = f"{' / '.join(run['name'] for run in runs)}: "
    title += "report" if len(runs) == 1 else "comparison"
    verdicts = [printable(f"{run['name']}: {run['verdict']}") for run in runs]
    parts = {
        **_assets(),
        "title": html.escape(printable(title)),
        "verdicts": "\n".join(f"<p>{html.escape(text)}</p>" for text in verdicts),
        "data": page_json(content),
    }
    return PLACE.sub(lambda match: parts[match[1]], parts.pop("page"))


def page_json(value: object) -> str:
    """Return a value as JSON text that is safe inside ``<script type="application/json">``.

    NaN and infinities become null. A value of a type that JSON does not have becomes text.
    """
    text = json.dumps(
        without_nan(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=str
    )
    return text.replace("<", "\\u003c")  # no text can open a tag or end the script


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for every run: the name of its folder, or full paths if two names are equal."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [path.as_posix() for path in paths]


@cache
def _assets() -> dict[str, str]:
    """Return the page's template, styles, scripts, and a security policy that allows only these."""
    style, script, library, page = (
        "\n".join((ASSETS / name).read_text(encoding="utf-8") for name in names)
        for names in (STYLES, SCRIPTS, (LIBRARY,), ("page.html",))
    )
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(library)} "
        f"{_hash(script)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    return {"page": page, "style": style, "library": library, "script": script, "policy": policy}


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _target(folders: Sequence[Path], path: str | Path | None) -> Path:
    if not folders:
        raise DataError("no run folder is given: name at least one")
    if path is None:
        return folders[0] / "report.html" if len(folders) == 1 else Path("comparison.html")
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise DataError(
            f"the report cannot be written to {str(path)!r}: give a path that ends in .html"
        )
    return Path(path)
