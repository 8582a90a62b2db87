"""Conversion of a model into a GGUF file, with llama.cpp's converter and quantiser.

The quantiser comes from the package llama-cpp-python, which contains all of llama.cpp with Python
bindings. The package xllamacpp has wheels, but cannot be used: its library lacks the quantiser.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.environment import cache_folder
from rloo_kit.machine.hardware import installed_version
from rloo_kit.text.wording import first_line

SCRIPT = "convert_hf_to_gguf.py"
# Data types that only the quantiser can write; the converter writes the other types
K_QUANTS = ("q5_k_m", "q4_k_m")


def find_converter(given: str | Path | None = None) -> list[str]:
    """Find llama.cpp's converter, and return the command that starts it, without arguments.

    Args:
        given: The converter's script, or the folder of llama.cpp. None uses the converter that
            ``scripts/fetch_converter.py`` downloaded or that Unsloth installed.

    Raises:
        ConfigError: No converter is found.
    """
    usual = [cache_folder() / "llama.cpp", Path(os.path.expanduser("~/.unsloth/llama.cpp"))]
    places = [Path(given).expanduser()] if given else usual
    for place in places:
        script = place if place.name == SCRIPT else place / SCRIPT
        if script.is_file():
            return [sys.executable, str(script.absolute())]
    raise ConfigError(
        f"llama.cpp's converter is not in {' or '.join(map(str, places))}: run `python "
        f"scripts/fetch_converter.py` to download it, or set --converter to llama.cpp's folder or "
        f"to its {SCRIPT}"
    )


def check_quantiser(dtype: str) -> None:
    """Check that llama.cpp's quantiser is installed, if the GGUF format ``dtype`` needs it.

    Raises:
        ConfigError: ``dtype`` needs the quantiser, which is not installed.
    """
    if dtype in K_QUANTS and installed_version("llama-cpp-python") is None:
        raise ConfigError(
            f"{dtype} needs llama.cpp's quantiser, which is missing: run `pip install "
            f"llama-cpp-python` (if there is no wheel for this machine, pip compiles it, which "
            f"needs a C++ compiler and takes minutes), or use --dtype q8_0"
        )


def write_gguf(model: Path, file: Path, dtype: str, command: Sequence[str]) -> None:
    """Convert a model's folder into a GGUF file, in a separate process.

    Args:
        model: Folder with 16-bit safetensors and a tokenizer. Its ``tokenizer.json`` is changed if
            the converter would misread it.
        file: The GGUF file to write.
        dtype: Format of the weights: ``bf16``, ``f16``, ``q8_0``, ``q5_k_m`` or ``q4_k_m``.
        command: The result of ``find_converter``.

    Raises:
        ModelError: The converter or the quantiser failed. The message contains the last line that
            the failed program printed.
    """
    _remove_byte_fallback(model / "tokenizer.json")
    whole, first = (model / "whole.gguf", "bf16") if dtype in K_QUANTS else (file, dtype)
    words = [*command, str(model), "--outfile", str(whole), "--outtype", first]
    _run(
        "converter",
        words,
        whole,
        "give another llama.cpp with --converter, or export with --to merged",
    )
    if dtype in K_QUANTS:
        words = [sys.executable, "-m", __name__, str(whole), str(file), dtype]
        _run("quantiser", words, file, "export with --dtype q8_0, which does not need it")


def _run(tool: str, words: Sequence[str], file: Path, remedy: str) -> None:
    done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode == 0 and file.is_file():
        return
    said = (done.stderr + done.stdout).strip() or f"exit code {done.returncode}"
    reason = first_line(RuntimeError(said.splitlines()[-1]))
    raise ModelError(f"llama.cpp's {tool} failed ({reason}): {remedy}")


def _remove_byte_fallback(file: Path) -> None:
    """Turn off ``byte_fallback`` in the file of a byte-level BPE tokenizer.

    transformers turns ``byte_fallback`` on for every Llama tokenizer that it reads from a GGUF
    file. The setting changes no token, but with it the converter takes the file for a SentencePiece
    tokenizer and loses the BPE merges.
    """
    if not file.is_file():
        return
    content = json.loads(file.read_bytes())
    if content["model"].get("byte_fallback") and "ByteLevel" in str(content["pre_tokenizer"]):
        content["model"]["byte_fallback"] = False
        file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _quantise(whole: str, file: str, dtype: str) -> int:
    """Quantise a 16-bit GGUF file to the K-quant ``dtype``; return 0 if that succeeded."""
    import llama_cpp  # the package, which pyright takes for this module

    params = llama_cpp.llama_model_quantize_default_params()  # pyright: ignore
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{dtype.upper()}")
    given = ctypes.pointer(params)
    return llama_cpp.llama_model_quantize(whole.encode(), file.encode(), given)  # pyright: ignore


if __name__ == "__main__":  # runs in a separate process, since llama.cpp may abort the process
    sys.exit(_quantise(*sys.argv[1:]))
