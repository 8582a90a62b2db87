"""``rloo-kit serve``: start vLLM's own OpenAI-compatible server with a trained adapter."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rloo_kit.diagnosis.record import read_json
from rloo_kit.errors import ConfigError, GenerationError
from rloo_kit.evaluation.models import find_trained
from rloo_kit.machine.hardware import why_not_vllm
from rloo_kit.models.adapters import CONFIG
from rloo_kit.models.engine_memory import reserved_rank
from rloo_kit.models.loading import find_model

MODULE = "vllm.entrypoints.openai.api_server"


def server_command(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command that serves a model: its base as ``base``, its adapter under its name.

    Args:
        model: A run, a checkpoint, an adapter or a model.
        host: Address to listen on; beyond this machine, anybody who reaches it may use it.
        port: TCP port.
        more: Further arguments of vLLM's server, such as ``--quantization bitsandbytes``.

    Raises:
        GenerationError: vLLM cannot be used here.
        ConfigError: The port is out of range.
        ModelError: The base is not available.
    """
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port is {port}, must be between 1 and 65535")
    if reason := why_not_vllm():
        raise GenerationError(f"vLLM's server cannot be started here: {reason}")
    trained = find_trained(model)
    words = ["--model", find_model(trained.base), "--served-model-name", "base"]
    words += ["--host", host, "--port", str(port)]
    words += ["--max-model-len", str(trained.model.max_seq_length)]
    if trained.adapter is not None:
        rank = str(reserved_rank(_rank(trained.adapter)))
        adapter = {"name": trained.short_name, "path": str(trained.adapter.resolve())}
        words += ["--max-lora-rank", rank, "--lora-modules", json.dumps(adapter), "--enable-lora"]
    trust = ["--trust-remote-code"] if trained.model.trust_remote_code else []
    return [sys.executable, "-m", MODULE, *words, *trust, *more]


def serve(
    model: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    more: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Replace this process by vLLM's server (see ``server_command``)."""
    command = server_command(model, host=host, port=port, more=more)
    trained = find_trained(model)
    names = dict.fromkeys([trained.short_name, "base"])
    say(f"http://{host}:{port}/v1 will answer as {' and as '.join(map(repr, names))}")
    sys.stdout.flush()
    os.execv(command[0], command)


def _rank(adapter: Path) -> int:
    """Return the largest LoRA rank of any layer."""
    config = read_json(adapter / CONFIG) or {}
    return max([config.get("r", 1), *config.get("rank_pattern", {}).values()])
