"""Conversion of GGUF files into ordinary Hugging Face folders, whose models can be trained.

transformers reads the file and dequantizes its weights to bf16, 2 bytes per parameter. The
converted folder is cached.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rloo_kit.errors import ModelError
from rloo_kit.machine.environment import cache_folder
from rloo_kit.machine.hardware import installed_version
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model, Tokenizer

MAGIC = b"GGUF"
CONVERSION = 2  # version of the conversion code; a change makes cached folders invalid
# Values of `tokenizer.ggml.token_type`
CONTROL = 3
USER_DEFINED = 4
# Padding tokens to use if the file's own padding token would end a completion
PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")


def convert(path: Path, cache_dir: Path | None = None) -> Path:
    """Convert a GGUF file into a Hugging Face folder, unless it was converted before.

    The EOS token is set to the token that ends an assistant's turn in the chat template.

    Args:
        path: The GGUF file.
        cache_dir: The parent of the converted folder; None for the kit's cache folder.

    Returns:
        The folder. Its name consists of the file's name without its suffix, and a hash of the
        file's path, size and modification time and of the version of the conversion code.

    Raises:
        ModelError: The file is missing, not a GGUF file, damaged, incomplete, or of an architecture
            that transformers cannot read. Or the package ``gguf`` is not installed.
    """
    path = Path(path).expanduser().absolute()
    goal = _goal(path, cache_dir)
    if goal.is_dir():
        return goal
    with _reading(path):
        model, tokenizer, missing = _read(path)
        _repair_tokens(model, tokenizer)
    if missing:  # transformers would initialise them randomly
        raise ModelError(
            f"{format_value(str(path))} lacks {len(missing)} weights of its model, such as "
            f"{missing[0]!r}: join the parts of a split file with llama.cpp's `llama-gguf-split "
            "--merge`, or use the model's Hugging Face folder or name"
        )
    try:
        _write(model, tokenizer, goal)
    except OSError as exc:
        raise ModelError(
            f"{format_value(str(path))} cannot be converted into {format_value(str(goal))} "
            f"({first_line(exc)}); free some space there"
        ) from exc
    return goal


def read_tokenizer(path: Path, cache_dir: Path | None = None) -> Any:
    """Return the tokenizer of a GGUF file without reading the model's weights.

    If the file was converted before, the tokenizer is loaded from the converted folder.

    Args:
        path: The GGUF file.
        cache_dir: As for ``convert``.

    Raises:
        ModelError: The file cannot be read; the reasons are those of ``convert``.
    """
    from transformers import AutoTokenizer

    path = Path(path).expanduser().absolute()
    goal = _goal(path, cache_dir)
    if goal.is_dir():
        return AutoTokenizer.from_pretrained(goal, trust_remote_code=False)
    with _reading(path):
        return _tokenizer_of(path)


def _tokenizer_of(path: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.integrations.gguf import read_gguf_metadata

    arrays = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    metadata, _ = read_gguf_metadata(str(path), arrays)
    tokenizer = _make_tokenizer(metadata) or AutoTokenizer.from_pretrained(**_source(path))
    _register_tokens(tokenizer, metadata)
    return tokenizer


def _register_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Register control and user-defined tokens, such as Qwen3's ``</think>``, in a tokenizer.

    The converters of transformers 5.17 register three of these tokens for Qwen and none for Gemma.
    The tokenizer would split tokens that are not registered into pieces.
    """
    from tokenizers import AddedToken

    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    known = tokenizer.get_added_vocab()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in (CONTROL, USER_DEFINED) and token not in known
        ]
    )


def _make_tokenizer(metadata: dict[str, Any]) -> Any | None:
    """Return a tokenizer made by transformers' fast GGUF converters; None if none is suitable.

    AutoTokenizer uses these converters too, but reads the file with a fast reader for one
    architecture only (transformers 5.17). For the others it uses a slow reader, which takes 4 s for
    49,000 tokens and runs twice.

    Args:
        metadata: The metadata of the GGUF file.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations import ggml

    architecture = metadata["general.architecture"]
    names = {architecture, f"{architecture}_text"} & ggml.GGUF_TO_FAST_CONVERTERS.keys()
    if not names:
        return None
    settings = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in ggml.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    backend, special = ggml.convert_gguf_tokenizer(names.pop(), settings)
    for kind in ("bos", "eos", "pad", "unk"):
        if (place := settings.get(f"{kind}_token_id")) is not None:
            special[f"{kind}_token"] = settings["tokens"][place]
    special["clean_up_tokenization_spaces"] = False
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error of a ``with`` block that reads a GGUF file into a ModelError.

    Raises:
        ModelError: The block raised an error, or the package ``gguf`` is not installed.
    """
    if installed_version("gguf") is None:
        raise ModelError("reading a .gguf file needs the package gguf: pip install gguf")
    try:
        yield
    except Exception as exc:  # every architecture has its own readers
        raise ModelError(
            f"transformers cannot read {format_value(str(path))} ({first_line(exc)}): it is "
            "damaged, or of an architecture that transformers does not know; download it again, or "
            "use the model's Hugging Face folder or name"
        ) from exc


def _source(path: Path) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "trust_remote_code": False,  # do not run code that lies in the same folder
    }


def _goal(path: Path, cache_dir: Path | None) -> Path:
    """Return the folder for the converted file, which may not exist yet.

    Raises:
        ModelError: The file cannot be read, or does not start with the magic bytes of GGUF.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        stat = path.stat()
    except (OSError, ValueError) as exc:  # ValueError: the character 0 in the path
        raise ModelError(
            f"cannot read {format_value(str(path))} ({first_line(exc)}); give the path of a .gguf "
            "file"
        ) from exc
    if magic != MAGIC:
        raise ModelError(
            f"{format_value(str(path))} is not a GGUF file: it starts with {magic!r}; give the "
            "path of a .gguf file, or download it again"
        )
    facts = f"{CONVERSION} {path} {stat.st_size} {stat.st_mtime_ns}"
    cache = Path(cache_dir or cache_folder() / "gguf").expanduser().absolute()
    return cache / f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _read(path: Path) -> tuple[Any, Any, list[str]]:
    """Return a GGUF file's model in bf16, its tokenizer, and the names of missing weights."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    source = _source(path)
    auto_model: Any = AutoModelForCausalLM  # its type stub lacks output_loading_info
    model, info = auto_model.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    return model, _tokenizer_of(path), sorted(info["missing_keys"])


def _repair_tokens(model: Model, tokenizer: Tokenizer) -> None:
    """Set the same BOS, EOS and padding tokens in the tokenizer and the model's two configs.

    This repairs tokenizers that transformers 5.17 makes for Llama. They use the file's BOS token as
    EOS token (integrations/ggml.py, ``GGUFLlamaConverter``), so that completions would never end.
    """
    config = model.config
    settings = model.generation_config
    given = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [end for end in given if end is not None]
    if ends:  # before the template is rendered, which may read the tokenizer's tokens
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ends[0])
    if tokenizer.bos_token is not None and config.bos_token_id is not None:
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(config.bos_token_id)
    turn_end = end_of_turn_id(tokenizer)
    if turn_end is not None:
        ends = [turn_end, *(end for end in ends if end != turn_end)]
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(turn_end)
    vocabulary = tokenizer.get_vocab()
    pads = (config.pad_token_id, *map(vocabulary.get, PAD_TOKENS))
    pad = next((one for one in pads if one is not None and one not in ends), None)
    config.pad_token_id = pad if pad is not None or not ends else ends[0]
    if config.pad_token_id is not None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    tokenizer.clean_up_tokenization_spaces = False
    config.eos_token_id = ends[0] if ends else None
    settings.eos_token_id = ends or None
    settings.bos_token_id = config.bos_token_id
    settings.pad_token_id = config.pad_token_id


def _write(model: Model, tokenizer: Tokenizer, goal: Path) -> None:
    """Write model and tokenizer to the folder ``goal``, atomically.

    The files are written to a temporary folder, which is then renamed. So the folder is either
    complete or does not exist.
    """
    goal.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=goal.parent) as work:
        folder = Path(work) / goal.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        try:
            os.rename(folder, goal)
        except OSError:
            if not goal.is_dir():  # another process may have finished first, with the same content
                raise
