"""GGUF files: convert one into an ordinary Hugging Face folder that can be trained.

The folder is cached. Quantized weights are dequantized to bf16: 2 bytes per parameter.

What transformers 5.17 reads from a GGUF file needs two repairs before training. Its Llama tokenizer
takes the end of text from the file's *beginning* of text (``integrations/ggml.py``,
``GGUFLlamaConverter``), so that no answer would ever end; and its model refuses
``save_pretrained`` while it remembers the quantization.
"""

import copy
import hashlib
import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from rloo_kit.errors import ModelError
from rloo_kit.machine.environment import cache_folder
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.wording import first_line, format_value, printable

MAGIC = b"GGUF"
HEAD_BYTES = 1 << 20  # hashed for the name of the folder
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


def convert(path: Path, cache_dir: Path | None = None) -> Path:
    """Return a Hugging Face folder with the model of a GGUF file, converting it only once.

    The end-of-text token becomes the one that ends an assistant's turn in the chat template. The
    folder's name holds the file's name and a hash of its size, modification time and first MiB.

    Args:
        path: The ``.gguf`` file, with a tokenizer inside.
        cache_dir: Parent of the folder; None: ``gguf`` in the kit's cache folder.

    Raises:
        ModelError: The file is missing, not a GGUF file, truncated, split, or of an architecture
            that transformers cannot read; or the package ``gguf`` is not installed.
    """
    path = Path(path).expanduser().absolute()
    _check_magic(path)
    cache = Path(cache_dir or cache_folder() / "gguf").expanduser().absolute()
    name = re.sub(r"[^\w.-]+", "-", path.stem)
    goal = cache / f"{name}-{_fingerprint(path)}"
    if goal.is_dir():
        return goal
    architecture = _check_content(path)
    model, tokenizer = _read(path, architecture)
    try:
        _repair_tokens(model, tokenizer)
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as exc:
        raise ModelError(
            f"the tokenizer in {format_value(str(path))} is damaged ({first_line(exc)}); download "
            "it again, or use the model's Hugging Face folder or name instead"
        ) from exc
    try:
        _write(model, tokenizer, goal)
    except OSError as exc:
        raise ModelError(
            f"{format_value(str(path))} cannot be converted into {format_value(str(goal))} "
            f"({first_line(exc)}); free some space there"
        ) from exc
    return goal


def _write(model: Any, tokenizer: Any, goal: Path) -> None:
    """Write the folder under another name and rename it: complete or absent."""
    goal.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=goal.parent) as work:
        folder = Path(work) / goal.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            os.rename(folder, goal)
        except OSError:
            if not goal.is_dir():  # else another process finished first, with the same content
                raise


def _check_magic(path: Path) -> None:
    """Raise ModelError unless ``path`` is a file that starts like a GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
    except (OSError, ValueError) as exc:  # ValueError: the character 0 in the path
        raise ModelError(
            f"cannot read {format_value(str(path))} ({first_line(exc)}); give the path of a .gguf "
            "file"
        ) from exc
    if magic != MAGIC:
        raise ModelError(
            f"{format_value(str(path))} is not a GGUF file: it starts with {magic!r}, not "
            f"{MAGIC!r}; give the path of a .gguf file, or download it again (a page or a Git LFS "
            "pointer may have been "
            "saved in its place)"
        )


def _fingerprint(path: Path) -> str:
    """Return 12 hex digits that change with the file's size, modification time or first MiB."""
    stat = path.stat()
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + head).hexdigest()[:12]


def _check_content(path: Path) -> str:
    """Return the file's architecture, after a check of its whole index."""
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            "reading a .gguf file needs the package gguf; install it with "
            'pip install "rloo-kit[gguf]"'
        )
    try:
        reader = _strict_reader(path)
        fields = map(reader.get_field, ("split.count", "general.architecture"))
        parts, architecture = (None if field is None else field.contents() for field in fields)
        _check_sizes(reader, str(architecture))
    except Exception as exc:  # what a damaged file raises depends on where the damage is
        raise ModelError(
            f"{format_value(str(path))} is truncated or damaged ({path.stat().st_size} bytes: "
            f"{first_line(exc)}); download it again"
        ) from exc
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{format_value(str(path))} is one part of several; join them with llama.cpp's "
            "`llama-gguf-split --merge` and give the joined file"
        )
    return "unknown" if architecture is None else printable(str(architecture)[:40])


def _strict_reader(path: Path) -> Any:
    """Return gguf's reader, which raises at the end of the file.

    gguf reads nothing behind the end, for as long as a damaged count of numbers says.
    """
    from gguf.gguf_reader import GGUFReader

    class StrictReader(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            found = super()._get(offset, dtype, count, *order, **options)
            if len(found) < count:
                raise ValueError(f"it ends before its part at byte {offset}")
            return found

    return StrictReader(path)


def _check_sizes(reader: Any, architecture: str) -> None:
    """Raise ValueError on a size that no tensor has: a model of it would fill the memory."""
    widest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    most = {
        "block_count": len(reader.tensors),
        "embedding_length": widest,
        "feed_forward_length": widest,
        "vocab_size": widest,
        "attention.head_count": widest,
        "attention.head_count_kv": widest,
        "attention.key_length": widest,
        "attention.value_length": widest,
        "expert_count": widest,
    }
    for name, limit in most.items():
        field = reader.get_field(f"{architecture}.{name}")
        given = None if field is None else field.contents()
        for size in given if isinstance(given, list) else [given]:
            if isinstance(size, int) and size > limit:
                raise ValueError(f"its {name} is {size}, and no tensor is as large")


def _read(path: Path, architecture: str) -> tuple[Any, Any]:
    """Return the file's bf16 model, free of its quantization, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "trust_remote_code": False,  # of files in the same folder
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        auto_model: Any = AutoModelForCausalLM  # its stub leaves out output_loading_info
        loaded, info = auto_model.from_pretrained(
            **source, dtype=torch.bfloat16, output_loading_info=True
        )
        model = _without_quantization(loaded)
    except Exception as exc:  # the same, and every architecture has readers of its own
        raise ModelError(
            f"transformers cannot read {format_value(str(path))}, of architecture {architecture!r} "
            f"({first_line(exc)}); use the model's Hugging Face folder or name instead"
        ) from exc
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{format_value(str(path))} lacks {len(missing)} weights of its architecture "
            f"{architecture!r}, {missing[0]!r} first; use the model's Hugging Face folder or name "
            f"instead"
        )
    return model, tokenizer


def _without_quantization(loaded: Any) -> Any:
    """Return a model with the tensors of ``loaded``, shared, and no memory of a quantization."""
    import torch

    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # no memory and no random weights: every tensor is replaced
        model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    model.tie_weights()
    return model


def _repair_tokens(model: Any, tokenizer: Any) -> None:
    """Set end, beginning and padding tokens, alike in tokenizer, config and generation config."""
    config = model.config
    given = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in given if end is not None]
    if ends:  # before the template is rendered: it may name its tokens through the tokenizer
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.bos_token is not None and config.bos_token_id is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(config.bos_token_id)
    turn_end = end_of_turn_id(tokenizer)
    if turn_end is not None:
        ends = [turn_end, *(end for end in ends if end != turn_end)]
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn_end)
    pad = _find_pad(tokenizer, config.pad_token_id, ends)
    if pad is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    tokenizer.padding_side = "left"
    tokenizer.init_kwargs["padding_side"] = "left"  # the attribute alone is not saved
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = getattr(config, "max_position_embeddings", None) or int(1e30)
    config.eos_token_id = ends[0] if ends else None
    config.pad_token_id = pad
    model.generation_config.eos_token_id = ends or None
    model.generation_config.bos_token_id = config.bos_token_id
    model.generation_config.pad_token_id = pad


def _find_pad(tokenizer: Any, file_pad: int | None, ends: list[int]) -> int | None:
    """Return the id to pad with: one that ends nothing, where the vocabulary has such a token."""
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary.get(token) for token in (*PAD_TOKENS, tokenizer.unk_token or "")]
    for candidate in (file_pad, *named):
        if candidate is not None and candidate not in ends:
            return candidate
    return ends[0] if ends else None
