"""Conversion of GGUF files into ordinary Hugging Face folders, whose models can be trained.

transformers reads the file and dequantises its weights to bf16, 2 bytes per parameter. The
converted folder is kept in the kit's cache.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rloo_kit.errors import ModelError
from rloo_kit.machine.environment import cache_folder
from rloo_kit.machine.hardware import installed_version
from rloo_kit.output_folder import disk_errors
from rloo_kit.text.chat_templates import end_of_turn_id
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model, Tokenizer

CONVERSION = 3  # version of the conversion code; a change makes cached folders invalid
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
        ModelError: The file is not a GGUF file, is damaged or incomplete, or has an architecture
            that transformers cannot read. Or the converted folder cannot be written, or the package
            ``gguf`` is not installed.
    """
    path = path.expanduser().absolute()
    goal = _goal(path, cache_dir)
    if goal.is_dir():
        return goal
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    auto_model: Any = AutoModelForCausalLM  # its type stub lacks output_loading_info
    with _reading(path):
        model, info = auto_model.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            trust_remote_code=False,  # do not run code that lies in the same folder
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        tokenizer = _tokenizer_of(path)
        _repair_tokens(model, tokenizer)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them randomly
        raise ModelError(
            f"{format_value(str(path))} lacks {len(missing)} weights of its model, such as "
            f"{missing[0]!r}: join the parts of a split file with llama.cpp's `llama-gguf-split "
            "--merge`, or use the model's Hugging Face folder or name"
        )
    what = f"{format_value(str(path))} cannot be converted into {format_value(str(goal))}"
    remedy = "free some space there, or set XDG_CACHE_HOME to another folder"
    with disk_errors(ModelError, what, remedy):
        _write(model, tokenizer, goal)
    return goal


def read_tokenizer(path: Path) -> Any:
    """Return the tokenizer of a GGUF file without reading the model's weights.

    If the file was converted before, the tokenizer is loaded from the converted folder.

    Args:
        path: The GGUF file.

    Raises:
        ModelError: The file cannot be read, or the package ``gguf`` is not installed.
    """
    from transformers import AutoTokenizer

    path = path.expanduser().absolute()
    goal = _goal(path)
    if goal.is_dir():
        return AutoTokenizer.from_pretrained(goal, trust_remote_code=False)
    with _reading(path):
        return _tokenizer_of(path)


def _tokenizer_of(path: Path) -> Any:
    """Return the tokenizer of a GGUF file, with control and user-defined tokens registered.

    Qwen3's ``</think>`` is such a token. The converters of transformers 5.17 register three such
    tokens for Qwen and none for Gemma, so the tokenizer would split the others into pieces. For
    Llama the converter uses the file's BOS token as EOS token, so completions would never end.
    This function therefore sets the special tokens that the file declares.
    """
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations import ggml
    from transformers.integrations.gguf import GGUF_TOKENIZER_ARCHS, get_gguf_tokenizer

    # transformers allows its fast reader for one architecture, but it can read all that have a
    # converter. The slow reader takes 4 s for 49,000 tokens, and AutoTokenizer runs it twice
    readable = {
        name.removesuffix("_text").replace("_", separator): name
        for name in ggml.GGUF_TO_FAST_CONVERTERS
        for separator in ("", "-")
    }
    with patch.dict(GGUF_TOKENIZER_ARCHS, readable | GGUF_TOKENIZER_ARCHS):
        kind_of_model, vocabulary, settings = get_gguf_tokenizer(str(path))
    backend, special = ggml.convert_gguf_tokenizer(kind_of_model, vocabulary)
    for name, value in settings.items():
        if value is not None and name.endswith(("_token", "_template")):
            special[name] = value
    special["clean_up_tokenization_spaces"] = False
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    known = tokenizer.get_added_vocab()
    kinds = zip(vocabulary["tokens"], vocabulary.get("token_type", ()), strict=False)
    declared: list[Any] = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in kinds
        if kind in (CONTROL, USER_DEFINED) and token not in known
    ]
    tokenizer.add_tokens(declared)
    return tokenizer


def check_package() -> None:
    """Check that the package ``gguf``, which reads GGUF files, is installed.

    Raises:
        ModelError: It is not installed.
    """
    if installed_version("gguf") is None:
        raise ModelError("reading a .gguf file needs the package gguf: pip install gguf")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn any error of a ``with`` block that reads a GGUF file into a ModelError.

    Raises:
        ModelError: The block raised an error, or the package ``gguf`` is not installed.
    """
    check_package()
    try:
        yield
    except Exception as exc:  # every architecture has its own readers
        raise ModelError(
            f"transformers cannot read {format_value(str(path))} ({first_line(exc)}): it is "
            "damaged, or of an architecture that transformers does not know; download it again, or "
            "use the model's Hugging Face folder or name"
        ) from exc


def _goal(path: Path, cache_dir: Path | None = None) -> Path:
    """Return the path of the converted folder of a GGUF file; the folder may not exist yet."""
    stat = path.stat()
    facts = f"{CONVERSION} {path} {stat.st_size} {stat.st_mtime_ns}"
    cache = cache_dir or cache_folder() / "gguf"
    return cache / f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _repair_tokens(model: Model, tokenizer: Tokenizer) -> None:
    """Set the same EOS and padding tokens in tokenizer, model config and generation config."""
    config = model.config
    given = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    found = dict.fromkeys((end_of_turn_id(tokenizer), *given))
    ends = [end for end in found if end is not None]
    if ends:
        tokenizer.eos_token_id = ends[0]
    pads = (config.pad_token_id, *map(tokenizer.get_vocab().get, PAD_TOKENS))
    usable = [pad for pad in pads if pad is not None and pad not in ends]
    config.pad_token_id = next(iter(usable + ends), None)
    tokenizer.pad_token_id = config.pad_token_id
    config.eos_token_id = ends[0] if ends else None
    settings = model.generation_config
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
