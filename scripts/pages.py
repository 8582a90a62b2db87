"""Functions that replace a generated part of a page.

The part is the text between the markers ``<!-- name: ... -->`` and ``<!-- /name -->``.
"""

import re
from pathlib import Path


def with_part(page: str, name: str, text: str) -> str:
    """Return a page with the text between the markers of ``name`` replaced by ``text``.

    Raises:
        ValueError: The page does not have exactly one pair of these markers.
    """
    marks = re.compile(rf"(<!-- {name}:.*?-->\n).*?(<!-- /{name} -->)", re.S)
    content, count = marks.subn(lambda found: f"{found[1]}{text}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"the page has {count} pairs of {name} markers, must have one")
    return content


def write_part(path: Path, name: str, text: str) -> None:
    """Replace the text between the markers of ``name`` in a file."""
    path.write_text(with_part(path.read_text(), name, text))
