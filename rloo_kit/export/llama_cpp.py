"""Find and run llama.cpp's converter; write Ollama's Modelfile."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.environment import cache_folder
from rloo_kit.text.wording import first_line, format_value, printable

SCRIPT = "convert_hf_to_gguf.py"
DTYPES = ("bf16", "f16", "q8_0")
# ChatML: Qwen, SmolLM2, tiny-thinker and many more
TURN = "<|im_start|>{role}\n{content}<|im_end|>\n"


def find_converter(given: str | Path | None = None) -> list[str]:
    """Return the command of a converter, without its arguments.

    Args:
        given: The script, or the folder of llama.cpp; None: ``LLAMA_CPP`` of the environment, then
            what ``scripts/fetch_converter.py`` fetched, what Unsloth installed, and the PATH.

    Raises:
        ConfigError: There is none.
    """
    named = given or os.environ.get("LLAMA_CPP")
    usual = (cache_folder() / "llama.cpp", Path.home() / ".unsloth" / "llama.cpp")
    for place in (Path(named).expanduser(),) if named else usual:
        script = place if place.name == SCRIPT else place / SCRIPT
        if script.is_file():
            return [sys.executable, str(script.absolute())]
    if named:
        raise ConfigError(
            f"no {SCRIPT} in {format_value(str(named))}: give llama.cpp's folder, or this script"
        )
    if found := shutil.which(SCRIPT):
        return [sys.executable, found]
    raise ConfigError(
        f"llama.cpp's converter is not here: fetch it with python scripts/fetch_converter.py, or "
        f"name its {SCRIPT} by --converter or the variable LLAMA_CPP"
    )


def write_gguf(model: Path, file: Path, dtype: str, command: Sequence[str]) -> None:
    """Convert a model's folder into a GGUF file, in another process.

    Args:
        model: Folder with 16-bit safetensors and a tokenizer, whose file may be corrected.
        file: To write.
        dtype: One of ``DTYPES``.
        command: As ``find_converter`` returned it.

    Raises:
        ModelError: The converter refuses the model; its last line is shown.
    """
    _remove_byte_fallback(model / "tokenizer.json")
    words = [*command, str(model), "--outfile", str(file), "--outtype", dtype]
    done = subprocess.run(words, capture_output=True, text=True, check=False, errors="replace")
    if done.returncode == 0 and file.is_file():
        return
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    reason = first_line(RuntimeError(lines[-1] if lines else f"exit code {done.returncode}"))
    raise ModelError(
        f"llama.cpp's converter failed ({reason}): take another llama.cpp by --converter, or "
        f"export --to merged"
    )


def _remove_byte_fallback(file: Path) -> None:
    """Remove ``byte_fallback`` from a tokenizer that is byte-level anyway.

    transformers writes it for every Llama that it read from a GGUF file. It changes no token, but
    the converter then reads the file as SentencePiece and loses the merges.
    """
    if not file.is_file():
        return
    content = json.loads(file.read_bytes())
    model, before = content.get("model") or {}, content.get("pre_tokenizer") or {}
    kinds = [one.get("type") for one in [before, *before.get("pretokenizers", [])]]
    if model.get("type") == "BPE" and model.get("byte_fallback") and "ByteLevel" in kinds:
        model["byte_fallback"] = False
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


# --- Ollama --------------------------------------------------------------------------------------


def modelfile(
    file: str, tokenizer: Any, ends: Sequence[str], *, temperature: float, num_ctx: int
) -> str:
    """Return a Modelfile; templates other than ChatML are left to the GGUF file.

    Args:
        file: Name of the GGUF file in the same folder.
        tokenizer: Of the model.
        ends: Texts of the tokens that end an answer.
        temperature: Of sampling.
        num_ctx: Longest prompt plus completion, tokens.
    """
    lines = [f"FROM ./{file}"]
    opening = _chatml_opening(tokenizer)
    if opening is None:
        lines.append("# no TEMPLATE: Ollama takes the chat template that the GGUF file holds")
    else:
        turns = "{{- range .Messages }}" + TURN.format(role="{{ .Role }}", content="{{ .Content }}")
        lines.append(f'TEMPLATE """{turns}{{{{ end }}}}{opening}"""')
    lines += ['PARAMETER stop "{}"'.format(printable(end).replace('"', '\\"')) for end in ends]
    lines += [f"PARAMETER temperature {temperature:g}", f"PARAMETER num_ctx {num_ctx}"]
    return "\n".join(lines) + "\n"


def _chatml_opening(tokenizer: Any) -> str | None:
    """Return what opens an answer; None where the chat template is not plain ChatML."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": role, "content": role} for role in ("system", "user")]
    with contextlib.suppress(Exception):  # a template is a program: it may fail
        plain = "".join(TURN.format(**turn) for turn in turns)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        opening = text.removeprefix(plain)
        if text.startswith(plain) and opening.startswith("<|im_start|>assistant\n"):
            return opening
    return None
