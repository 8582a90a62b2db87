"""The choice of the live view: by the output, or by an environment variable."""

import os
from typing import TYPE_CHECKING

from rloo_kit.errors import ConfigError

if TYPE_CHECKING:
    from rloo_kit.live.view import LiveView

# Environment variable that chooses the view
VARIABLE = "RLOO_KIT_LIVE"
CHOICES = ("auto", "notebook", "plain", "off")


def chosen_view() -> str:
    """Return the value of RLOO_KIT_LIVE; ``auto`` if it is not set.

    Raises:
        ConfigError: The value is not in ``CHOICES``.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}, must be one of {', '.join(CHOICES)}")
    return choice


def live_progress() -> "LiveView":
    """Return the view that RLOO_KIT_LIVE names; by default lines, and a figure in a notebook.

    Raises:
        ConfigError: The value of RLOO_KIT_LIVE is not in ``CHOICES``.
    """
    from rich.console import Console

    from rloo_kit.live.notebook import NotebookFigure
    from rloo_kit.live.view import LiveView, PlainLines

    choice = chosen_view()
    if choice == "auto":
        choice = "notebook" if Console().is_jupyter else "plain"
    return {"notebook": NotebookFigure, "plain": PlainLines, "off": LiveView}[choice]()
