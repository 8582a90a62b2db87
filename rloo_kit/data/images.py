"""Functions that find, check and store the images of prompts.

Images are stored as ``datasets.Image``, which decodes an image only when a row is read. TRL reads
images from a column ``image`` or ``images``. TRL 1.15 does not pass images inside messages to the
training step, so the kit moves them from the messages to the column ``images``.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_kit.data.files import as_dataset, iter_column, replace_column
from rloo_kit.errors import DataError
from rloo_kit.output_folder import write_atomically
from rloo_kit.text.wording import first_line, format_value

if TYPE_CHECKING:
    from datasets import Dataset

# Columns from which TRL reads images
IMAGE_COLUMNS = ("image", "images")
# Keys under which a message part {"type": "image", ...} may hold its image
PART_KEYS = ("image", "path", "url")
# Subfolder of a run folder for thumbnails, and the longer side of a thumbnail in pixels
THUMBNAILS = "images"
THUMBNAIL_SIZE = 128


def has_images(dataset: Any) -> bool:
    """Return whether the prompts have images, in an image column or inside the messages.

    Args:
        dataset: A ``datasets.Dataset``, or anything that yields rows. Only its features are read,
            or its first row if it has no features.
    """
    row = _features(dataset)
    return any(name in row for name in IMAGE_COLUMNS) or _has_image_part(row.get("prompt"))


def check_images(dataset: Any, processing_class: Any) -> None:
    """Check that TRL's training step can use the images of the prompts.

    Args:
        dataset: A dataset with images (see ``has_images``).
        processing_class: Processor that was passed to the trainer; None: TRL loads it.

    Raises:
        DataError: ``processing_class`` is only a tokenizer, or images are inside messages.
    """
    if processing_class is not None and not hasattr(processing_class, "image_processor"):
        raise DataError(
            "the prompts have images, but processing_class is a tokenizer: load a vision model and "
            "its processor with load_model(..., images=True)"
        )
    if _has_image_part(_features(dataset).get("prompt")):
        raise DataError(
            "images are inside the messages of the prompts, but TRL reads them from a column: put "
            'them into the column images, and leave {"type": "image"} in the messages, as '
            "load_prompts does for a file"
        )


def _features(dataset: Any) -> Mapping[str, Any]:
    return getattr(dataset, "features", None) or next(iter(dataset), {})


def _has_image_part(node: Any) -> bool:
    """Return whether messages, or the features of a column of messages, contain an image part."""
    if isinstance(node, Mapping):
        return any(key in node for key in PART_KEYS) or _has_image_part(node.get("content"))
    if isinstance(node, list | tuple):
        return any(map(_has_image_part, node))
    return hasattr(node, "feature") and _has_image_part(node.feature)


# --- reading -------------------------------------------------------------------------------------


def text_as_parts(messages: Any) -> Any:
    """Return chat messages whose contents all have the same type, as a dataset column requires.

    If the content of any message is a list of parts, every text is replaced by a list with one text
    part. Otherwise the messages are returned unchanged.
    """
    if not any(isinstance(message["content"], list) for message in messages):
        return messages
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message["content"], str)
        else message
        for message in messages
    ]


def store_images(dataset: "Dataset", folder: Path, name: str) -> "Dataset":
    """Return the prompts with their images in a column of type ``datasets.Image`` or a list of it.

    A column that already has such a type is not changed. All other images are opened once to check
    them, but not decoded.

    Args:
        dataset: Prompts whose images are paths, bytes, or dicts with the keys ``path`` and
            ``bytes``.
        folder: Folder to which paths of images are relative.
        name: Name of the prompts, for error messages.

    Raises:
        DataError: An image is missing or cannot be read, both messages and a column have images,
            or the prompts are plain text instead of chat messages.
    """
    import datasets

    if not has_images(dataset):
        return dataset
    if isinstance(dataset.features["prompt"], datasets.Value):
        raise DataError(
            f"{name} has images, which need chat messages: leave data.chat true (chat=True)"
        )
    dataset = _split_messages(dataset, name)
    for column in set(IMAGE_COLUMNS) & set(dataset.column_names):
        feature = dataset.features[column]
        if isinstance(getattr(feature, "feature", feature), datasets.Image):
            continue
        stored = [
            [
                _stored(value, folder, f"{name}, row {number}")
                for value in (values if isinstance(values, list) else [values])
                if value
            ]
            for number, values in enumerate(iter_column(dataset, column), 1)
        ]
        is_single = column == "image" and all(len(images) == 1 for images in stored)
        # TRL accepts rows without an image only in the column of lists
        new = "image" if is_single else "images"
        kind = datasets.Image() if is_single else datasets.List(datasets.Image())
        rows = ({new: images[0] if is_single else images} for images in stored)
        made = as_dataset(rows, datasets.Features({new: kind}))
        dataset = replace_column(dataset, column, made)
    return dataset


def _split_messages(dataset: "Dataset", name: str) -> "Dataset":
    """Move the images in messages to the column ``images``.

    The image part stays in its message, but without the image, to mark the position of the image.
    """
    if not _has_image_part(dataset.features["prompt"]):
        return dataset
    rows = []
    for prompt in iter_column(dataset, "prompt"):
        images = []
        for part in (part for message in prompt for part in message["content"] or ()):
            values = [part.pop(key) for key in PART_KEYS if key in part]
            images += [value for value in values if value][:1]
        rows.append({"prompt": prompt, "images": images})
    made = as_dataset(rows)
    if not any(row["images"] for row in rows):
        made = made.remove_columns("images")
    elif has_images(dataset.remove_columns("prompt")):
        raise DataError(f"{name} has images in messages and in a column: keep one of them")
    return replace_column(dataset, "prompt", made)


def _stored(value: Any, folder: Path, place: str) -> dict[str, Any]:
    """Read the header of an image and return it as ``datasets.Image`` stores it.

    The result is a dict with ``bytes`` and ``path``, one of which may be None.

    Raises:
        DataError: The image is a URL, is missing, or cannot be read.
    """
    from PIL import Image

    key = "bytes" if isinstance(value, bytes) else "path"
    stored: Mapping[str, Any] = value if isinstance(value, Mapping) else {key: value}
    content = stored.get("bytes")
    path = stored.get("path") or ""
    try:
        if not content:
            path = str(folder / Path(path).expanduser())
        with Image.open(io.BytesIO(content) if content else path):
            pass
    except Exception as exc:  # PIL raises errors of many kinds
        raise DataError(
            f"{place}: the image {format_value(path)} cannot be read ({first_line(exc)}): give a "
            "PNG, JPEG or WebP file on this machine (images are not downloaded), with its path "
            "relative to the folder of the data file"
        ) from exc
    return {"bytes": content, "path": path or None}


# --- thumbnails in the record of a run -----------------------------------------------------------


def save_thumbnails(value: Any, folder: Path) -> Any:
    """Save a thumbnail of each PIL image in a value, and return the value with file names.

    A thumbnail (a few kB) is saved as ``images/DIGEST.jpg`` in ``folder``, unless this file exists
    already. In the returned value this name replaces the image.

    Args:
        value: Nested dicts and lists, which are not changed.
        folder: Folder of the record of the run.
    """
    if isinstance(value, Mapping):
        return {key: save_thumbnails(item, folder) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [save_thumbnails(item, folder) for item in value]
    if not hasattr(value, "thumbnail"):
        return value
    small = value.convert("RGB")
    content = io.BytesIO()
    small.thumbnail((THUMBNAIL_SIZE, THUMBNAIL_SIZE))
    small.save(content, "JPEG", quality=80)
    name = f"{THUMBNAILS}/{hashlib.sha256(content.getvalue()).hexdigest()[:16]}.jpg"
    path = folder / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, content.getvalue())
    return name
