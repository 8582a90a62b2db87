"""Choice of the live view, from the environment variable RLOO_KIT_LIVE or the kind of output."""

import builtins
import os
from typing import TYPE_CHECKING

from rloo_kit.errors import ConfigError

if TYPE_CHECKING:
    from rloo_kit.live.view import LiveView

# Environment variable that chooses the view
VARIABLE = "RLOO_KIT_LIVE"
CHOICES = ("auto", "notebook", "plain", "off")


def chosen_view() -> str:
    """Return the value of RLOO_KIT_LIVE, or ``auto`` if it is not set.

    Raises:
        ConfigError: The value is not ``auto``, ``notebook``, ``plain`` or ``off``.
    """
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise ConfigError(f"{VARIABLE} is {choice!r}, must be one of {', '.join(CHOICES)}")
    return choice


def live_progress() -> "LiveView":
    """Return a new view of the kind that RLOO_KIT_LIVE names.

    By default, the view shows a figure in a notebook and prints lines of text elsewhere. If
    ``notebook`` is set outside of IPython, the view prints lines, because no figure can be shown.

    Raises:
        ConfigError: The value is not ``auto``, ``notebook``, ``plain`` or ``off``.
    """
    from rich.console import Console

    from rloo_kit.live.view import LiveView, NotebookFigure, PlainLines

    choice = chosen_view()
    if choice == "auto":
        choice = "notebook" if Console().is_jupyter else "plain"
    elif choice == "notebook" and not hasattr(builtins, "get_ipython"):
        choice = "plain"  # there is no cell to draw in
    return {"notebook": NotebookFigure, "plain": PlainLines, "off": LiveView}[choice]()
