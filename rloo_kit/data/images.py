"""Images of prompts: which data sets have some."""

from collections.abc import Mapping
from typing import Any

# TRL's names
IMAGE_COLUMNS = ("image", "images")


def has_images(dataset: Any) -> bool:
    """Return whether prompts have images: in a column ``image`` or ``images``, or as parts.

    Args:
        dataset: Of ``datasets``, or anything that yields rows. Only its features are read, or its
            first row where it has none.
    """
    row = getattr(dataset, "features", None) or next(iter(dataset), {})
    return any(name in row for name in IMAGE_COLUMNS) or _has_image_part(row.get("prompt"))


def _has_image_part(node: Any) -> bool:
    """Search messages, or the features of messages, for a part with an image."""
    if isinstance(node, Mapping):
        return "image" in node or _has_image_part(node.get("content"))
    if isinstance(node, list | tuple):
        return any(map(_has_image_part, node))
    return hasattr(node, "feature") and _has_image_part(node.feature)
