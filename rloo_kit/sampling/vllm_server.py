"""Client of a vLLM server on another GPU or machine: sends adapters and receives completions.

With this client the server keeps its base model unchanged, and the trainer does not need vLLM.
TRL's server mode differs: it merges the adapter and sends all weights over NCCL, which needs CUDA
in the trainer. For a 4-bit layer it would send packed bytes without the scales to unpack them.
"""

import asyncio
import contextlib
import os
import re
import shlex
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from anyio.from_thread import start_blocking_portal

from rloo_kit.errors import GenerationError
from rloo_kit.models.engine_memory import MAX_SEQUENCES, reserved_rank
from rloo_kit.models.shape import is_quantised
from rloo_kit.sampling.engine import AdapterFolder, Generations, Sampling, active_adapter
from rloo_kit.text.wording import first_line
from rloo_kit.types import Model

if TYPE_CHECKING:
    import torch

# Marks in the hub names of models whose weights are already quantised
PREQUANTIZED = ("bnb-4bit", "bnb-8bit", "-awq", "-gptq", "-fp8")


@dataclass(frozen=True)
class Needs:
    """Requirements of a run for its vLLM server."""

    base: str  # hub name or folder of the base model
    max_length: int  # maximum tokens of prompt and completion together
    rank: int  # rank of the adapter
    in_4bit: bool
    revision: str | None = None  # branch, tag or commit of `base` on the hub; None for main
    trust_remote_code: bool = False  # True if code that comes with the base may run

    @property
    def command(self) -> str:
        """Shell command that starts a server with these requirements."""
        command = (
            f"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve {shlex.quote(self.base)} "
            f"--enable-lora --max-lora-rank {reserved_rank(self.rank)} "
            f"--max-model-len {self.max_length} --logprobs-mode processed_logprobs "
            f"--generation-config vllm"
        )
        if self.in_4bit and not self._is_quantised:
            command += " --quantization bitsandbytes"
        if self.revision is not None:
            command += f" --revision {shlex.quote(self.revision)}"
        if self.trust_remote_code:
            command += " --trust-remote-code"
        return command

    @property
    def _is_quantised(self) -> bool:
        """True if the weights of the base are already quantised, as vLLM sees from its config."""
        if os.path.exists(self.base):
            return is_quantised(self.base)
        return any(mark in self.base.lower() for mark in PREQUANTIZED)

    def is_other(self, name: str, root: str) -> bool:
        """Return True if the names show that a server has another model than ``base``.

        If ``base`` or ``root`` is a folder, the names cannot be compared, and the result is False.

        Args:
            name: The name under which the server offers its model.
            root: The hub name or folder from which it has loaded the model.
        """
        if Path(self.base).exists() or root.startswith("/"):
            return False  # if the models differ, the canary detects it later
        # compare names without owners and without the suffixes of Unsloth's 4-bit copies
        names = (self.base, name, root)
        ours, *served = [re.sub(r".*/|(-unsloth)?-bnb-4bit$", "", one.lower()) for one in names]
        return ours not in served


class VllmServer:
    """Engine that samples on a vLLM server (see ``Engine``).

    Args:
        args: A ``LeaveOneOutConfig``, with the address and the folder for the adapter.
        needs: Requirements of the run.
        adapter_dtype: The dtype to which an adapter is rounded; None if the model is not loaded
            yet. With None, the server's model is also compared with ``needs.base``. Once the model
            is loaded, its name may differ, because Unsloth may load it under another name.

    Raises:
        GenerationError: The server cannot be reached within ``vllm_server_timeout`` seconds, is not
            vLLM, serves another model, has a shorter context length than the run needs, or does not
            accept adapters at run time.
    """

    def __init__(self, args: Any, needs: Needs, adapter_dtype: "torch.dtype | None" = None) -> None:
        address = (
            args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        )
        self.url = address.rstrip("/").removesuffix("/v1")
        self.name = f"vLLM's server at {self.url}"
        self.sync_seconds = 0.0  # duration of the last sync
        self.adapter_dtype = adapter_dtype
        self._remedy = f"start it with {needs.command}"
        self._patience = args.vllm_server_timeout
        self._adapter: str | None = None  # the adapter's name on the server; None for the base
        self._base = self._check(needs)
        self._folder = AdapterFolder(args.vllm_adapter_dir)
        self._folder.root.chmod(0o755)  # the server may run as another user

    def _check(self, needs: Needs) -> str:
        """Check that the server suits the run; return the server's name of the base model.

        Raises:
            GenerationError: The server cannot be reached or does not suit the run.
        """
        (models,) = self._ask("/v1/models", None)
        # an empty request is an error, but only a server without this path answers with status 404
        (adapters,) = self._ask("/v1/load_lora_adapter", {})
        name, root, self.max_length = self._read(models, _card)
        if adapters.status_code == httpx.codes.NOT_FOUND:
            reason = "does not accept adapters at run time"
        elif self.max_length < needs.max_length:
            most = self.max_length
            reason = f"accepts {most} tokens at most, but the run needs {needs.max_length}"
        elif self.adapter_dtype is None and needs.is_other(name, root):
            reason = f"serves {root!r}, but the run trains {needs.base!r}"
        else:
            self.name += f" ({root})"
            return name
        raise GenerationError(f"{self.name} {reason}: {self._remedy}")

    def sync(self, model: Model) -> None:
        """Send the active adapter of ``model`` to the server, and remove the previous adapter.

        If no adapter is active, none is sent, and the server samples from the base model.

        Raises:
            GenerationError: The server cannot be reached or rejects the adapter.
        """
        started = time.perf_counter()
        before = self._adapter
        self._adapter = None
        if active_adapter(model) is not None:
            self._folder.write(model, self.adapter_dtype)
            # A new name each time, because vLLM's prefix cache uses it as a key. With
            # `load_inplace` vLLM would read the file again in every pass, as requests keep the flag
            self._adapter = f"rloo-kit-{uuid.uuid4().hex}"
            self._load()
        if before is not None:  # errors are ignored: a restarted server does not know it
            self._ask("/v1/unload_lora_adapter", {"lora_name": before})
        self.sync_seconds = time.perf_counter() - started

    def _load(self) -> None:
        body = {"lora_name": self._adapter, "lora_path": str(self._folder.root / "adapter")}
        self._read(self._ask("/v1/load_lora_adapter", body)[0])

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """Sample one completion of each prompt, each with its own seed (see ``Engine``).

        Raises:
            GenerationError: The server cannot be reached, or does not return completions.
        """
        same = sampling.as_vllm() | {"model": self._adapter or self._base, "return_token_ids": True}
        bodies = [
            same
            | {
                "prompt": ids,
                "seed": (seed + row) % 2**31,
                # the server refuses a request that may not fit, such as a later turn with tools
                "max_tokens": max(1, min(sampling.max_tokens, self.max_length - len(ids))),
            }
            for row, ids in enumerate(prompt_ids)
        ]
        answers = self._ask("/v1/completions", *bodies)
        if self._adapter and any(a.status_code == httpx.codes.NOT_FOUND for a in answers):
            self._load()  # the server was restarted
            answers = self._ask("/v1/completions", *bodies)
        return Generations.of(self._read(answer, _completion) for answer in answers)

    def sleep(self) -> None:
        """Do nothing, because the server does not use the memory of the trainer."""

    def close(self) -> None:
        """Delete the adapter's folder; the server may keep its loaded copy of the adapter."""
        self._folder.close()

    # --- HTTP ------------------------------------------------------------------------------------

    def _ask(self, path: str, *bodies: dict[str, Any] | None) -> list[httpx.Response]:
        """Send all requests at once; return the responses in their order.

        Args:
            path: The path on the server.
            *bodies: For each request the JSON body of a POST; None sends a GET.
        """

        async def ask_all() -> list[httpx.Response]:
            async with httpx.AsyncClient(
                headers={"Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}"},
                timeout=httpx.Timeout(None, connect=5.0),
                limits=httpx.Limits(max_connections=MAX_SEQUENCES),
                verify=self.url.startswith("https:"),  # reading the certificates takes a while
                trust_env=False,  # no proxy
            ) as client:
                asked = [self._request(client, f"{self.url}{path}", body) for body in bodies]
                return await asyncio.gather(*asked)

        # in another thread, because a notebook's thread already runs an event loop; Ctrl-C cancels
        # the requests
        with start_blocking_portal() as portal:
            return portal.call(ask_all)

    async def _request(
        self, client: httpx.AsyncClient, url: str, body: dict[str, Any] | None
    ) -> httpx.Response:
        """Send a request and return the response.

        If the server is down, try again every second for up to ``vllm_server_timeout`` seconds.

        Raises:
            GenerationError: The server cannot be reached.
        """
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await client.request("GET" if body is None else "POST", url, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                is_down = isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
                if not is_down or time.monotonic() >= deadline:
                    raise GenerationError(
                        f"{self.name} cannot be reached ({first_line(exc)}): look at its log, or "
                        f"{self._remedy}"
                    ) from exc
            warnings.warn(
                f"waiting up to {self._patience:g} s for {self.name}: {self._remedy}", stacklevel=2
            )
            await asyncio.sleep(1)

    def _read(self, answer: httpx.Response, read: Callable[[Any], Any] | None = None) -> Any:
        """Return what ``read`` extracts from the JSON of a response; None if ``read`` is None.

        Raises:
            GenerationError: The response is an error, or ``read`` does not find what it needs.
        """
        if answer.is_success:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                return read and read(answer.json())
        try:
            text = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = answer.text
        remedy = f"look at its log, fix the reported problem, or {self._remedy}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            remedy = "set the environment variable VLLM_API_KEY to the server's key"
        elif "No adapter found" in text:
            remedy = "set trainer.vllm_adapter_dir to a folder that both machines can access"
        what = f"{answer.status_code} ({first_line(Exception(text))})"
        raise GenerationError(f"{self.name} answers {what}: {remedy}")


def _card(found: dict[str, Any]) -> tuple[str, str, int]:
    """Return the name, the loaded model and the context length in the JSON of ``/v1/models``."""
    card = found["data"][0]
    return card["id"], card["root"] or card["id"], int(card["max_model_len"])


def _completion(found: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probabilities in the JSON response of ``/v1/completions``."""
    (choice,) = found["choices"]
    return list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
