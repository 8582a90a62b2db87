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
    if named:
        if (script := _script_in(Path(named).expanduser())) is None:
            raise ConfigError(
                f"no {SCRIPT} in {format_value(str(named))}: give llama.cpp's folder, or this "
                "script of it"
            )
        return [sys.executable, str(script)]
    for folder in (cache_folder() / "llama.cpp", Path.home() / ".unsloth" / "llama.cpp"):
        if (script := _script_in(folder)) is not None:
            return [sys.executable, str(script)]
    if found := shutil.which(SCRIPT):
        return [sys.executable, found]
    raise ConfigError(
        f"llama.cpp's converter is not here: fetch it with python scripts/fetch_converter.py, or "
        f"name its {SCRIPT} by --converter or the variable LLAMA_CPP"
    )


def _script_in(place: Path) -> Path | None:
    script = place if place.name == SCRIPT else place / SCRIPT
    return script.absolute() if script.is_file() else None


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
    if "pre-tokenizer was not recognized" in reason:
        raise ModelError(
            "llama.cpp does not know how this model's tokenizer cuts a text into words, and its "
            "converter refuses it: export --to merged, which vLLM and transformers load"
        )
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
) -> tuple[str, bool]:
    """Return a Modelfile, and whether it has a template of its own.

    Args:
        file: Name of the GGUF file in the same folder.
        tokenizer: Of the model.
        ends: Texts of the tokens that end an answer.
        temperature: Of sampling.
        num_ctx: Longest prompt plus completion, tokens.
    """
    lines = [f"FROM ./{file}"]
    known = _chatml(tokenizer)
    if known is None:
        lines.append("# no TEMPLATE: Ollama takes the chat template that the GGUF file holds")
    else:
        opening, system = known
        turns = "{{- range .Messages }}" + TURN.format(role="{{ .Role }}", content="{{ .Content }}")
        lines.append(f'TEMPLATE """{turns}{{{{ end }}}}{opening}"""')
        if system:
            lines.append(f'SYSTEM """{system}"""')
    lines += [f'PARAMETER stop "{end}"' for end in ends]
    lines += [f"PARAMETER temperature {temperature:g}", f"PARAMETER num_ctx {num_ctx}"]
    return "\n".join(lines) + "\n", known is not None


def _chatml(tokenizer: Any) -> tuple[str, str] | None:
    """Return what opens an answer and the template's own system message; None: no ChatML."""
    if not tokenizer.chat_template:
        return None
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    turns = [*turns, {"role": "user", "content": "three"}]
    with contextlib.suppress(Exception):  # a template is a program: it may fail
        plain = "".join(TURN.format(**turn) for turn in turns)
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, found, opening = text.partition(plain)
        system = before.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n")
        whole = before in ("", TURN.format(role="system", content=system))
        if found and whole and opening.startswith("<|im_start|>assistant\n"):
            return opening, system
    return None


def quoted(text: str) -> str:
    """Return a token's text as a Modelfile's PARAMETER takes it."""
    return printable(text).replace('"', '\\"')
