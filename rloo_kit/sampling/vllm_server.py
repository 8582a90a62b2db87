"""Client of vLLM's own server, on another card or machine: sends adapters, receives completions.

TRL's server mode sends weights over NCCL, which needs CUDA in the trainer, with the adapter merged
into them. For a 4-bit layer it sends the packed bytes, without the scales that unpack them. Here
the base stays as the server loaded it, and this process does not need vLLM.
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
from rloo_kit.models.loading import PREQUANTIZED
from rloo_kit.sampling.engine import AdapterFolder, Generations, Sampling, active_adapter
from rloo_kit.text.wording import first_line
from rloo_kit.types import Model

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Needs:
    """The requirements of a run on its server."""

    base: str  # hub name or folder of the base
    max_length: int  # prompt plus completion, tokens
    rank: int  # of the adapter
    in_4bit: bool

    @property
    def command(self) -> str:
        """The command that starts such a server."""
        words = ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True", "vllm", "serve", self.base]
        words += ["--enable-lora", "--max-lora-rank", str(reserved_rank(self.rank))]
        words += ["--max-model-len", str(self.max_length)]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if self.in_4bit and not any(mark in self.base.lower() for mark in PREQUANTIZED):
            words += ["--quantization", "bitsandbytes"]
        return shlex.join(words)

    def is_other(self, card: dict[str, Any]) -> bool:
        """Return whether a server names a model other than ``base``; False if either is a folder.

        Args:
            card: The server's entry for its model, from ``/v1/models``.
        """
        if Path(self.base).exists() or card["root"].startswith("/"):
            return False  # the canary finds out
        # without owners, and without the suffixes of Unsloth's 4-bit copies
        names = (self.base, card["id"], card["root"])
        ours, *served = [re.sub(r".*/|(-unsloth)?-bnb-4bit$", "", one.lower()) for one in names]
        return ours not in served


class VllmServer:
    """Engine on a server of vLLM (see ``Engine``).

    Args:
        args: A ``LeaveOneOutConfig``, with the address and the folder for the adapter.
        needs: Requirements of the run.
        adapter_dtype: Type to which an adapter is rounded. None if the model is not loaded yet;
            then the server must name the base of ``needs``.

    Raises:
        GenerationError: The server cannot be reached within ``vllm_server_timeout`` seconds, is not
            vLLM, serves another model or shorter rows, or does not accept adapters at run time.
    """

    def __init__(self, args: Any, needs: Needs, adapter_dtype: "torch.dtype | None" = None) -> None:
        address = args.vllm_server_base_url
        address = address or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        self.url = address.rstrip("/").removesuffix("/v1")
        self.name = f"vLLM's server at {self.url}"
        self.sync_seconds = 0.0  # of the last sync
        self.adapter_dtype = adapter_dtype
        self._needs = needs
        self._remedy = f"start it with {needs.command}"
        self._patience = args.vllm_server_timeout
        self._adapter: str | None = None  # its name on the server; None for the base alone
        self._base = self._check()
        self._folder = AdapterFolder(args.vllm_adapter_dir)
        self._folder.root.chmod(0o755)  # the server may be another user's

    def _check(self) -> str:
        """Return the name of the base on the server."""
        (models,) = self._ask("/v1/models", None)
        (adapters,) = self._ask("/v1/load_lora_adapter", {})  # 400 where there is such a path
        card = self._read(models, lambda found: found["data"][0])
        longest = self._needs.max_length
        if adapters.status_code == httpx.codes.NOT_FOUND:
            reason = "takes no adapters at run time"
        elif card["max_model_len"] < longest:
            reason = f"takes rows of {card['max_model_len']} tokens, and the run needs {longest}"
        elif self.adapter_dtype is None and self._needs.is_other(card):
            reason = f"serves {card['root']!r}, and the run trains {self._needs.base!r}"
        else:
            self.name += f" ({card['root']})"
            return card["id"]
        raise GenerationError(f"{self.name} {reason}: {self._remedy}")

    def sync(self, model: Model) -> None:
        """Send the active adapter, if there is one, and drop the previous one.

        Raises:
            GenerationError: The server cannot be reached or rejects the adapter.
        """
        started = time.perf_counter()
        before = self._adapter
        self._adapter = None
        if active_adapter(model) is not None:
            self._folder.write(model, self.adapter_dtype)
            # A new name each time, because it is a key of vLLM's prefix cache. With `load_inplace`
            # vLLM would read the file again in every pass, since its requests keep that flag
            self._adapter = f"rloo-kit-{uuid.uuid4().hex}"
            self._load()
        if before is not None:  # unknown to a server that was restarted
            self._ask("/v1/unload_lora_adapter", {"lora_name": before})
        self.sync_seconds = time.perf_counter() - started

    def _load(self) -> None:
        body = {"lora_name": self._adapter, "lora_path": str(self._folder.root / "adapter")}
        (answer,) = self._ask("/v1/load_lora_adapter", body)
        self._read(answer)

    def generate(self, prompt_ids: list[list[int]], sampling: Sampling, seed: int) -> Generations:
        """Complete each prompt once (see ``Engine``); every completion has a seed of its own.

        Raises:
            GenerationError: The server cannot be reached, or does not answer with completions.
        """
        same = {"model": self._adapter or self._base, "return_token_ids": True}
        same |= sampling.as_vllm()
        rows = enumerate(prompt_ids)
        bodies = [{**same, "prompt": ids, "seed": (seed + row) % 2**31} for row, ids in rows]
        answers = self._ask("/v1/completions", *bodies)
        if self._adapter and any(a.status_code == httpx.codes.NOT_FOUND for a in answers):
            self._load()  # the server was restarted
            answers = self._ask("/v1/completions", *bodies)
        drawn = [self._read(answer, _completion) for answer in answers]
        return Generations([ids for ids, _ in drawn], [log_probs for _, log_probs in drawn])

    def sleep(self) -> None:
        """Do nothing, because the server has memory of its own."""

    def close(self) -> None:
        """Remove the adapter's folder; the server keeps its copy until it needs the memory."""
        self._folder.close()

    # --- HTTP ------------------------------------------------------------------------------------

    def _ask(self, path: str, *bodies: dict[str, Any] | None) -> list[httpx.Response]:
        """POST all bodies at once (None: GET); return the answers in their order."""
        # in a thread, because a notebook's thread has a loop already; Ctrl-C cancels the requests
        with start_blocking_portal() as portal:
            return portal.call(self._ask_all, path, bodies)

    async def _ask_all(self, path: str, bodies: tuple[dict[str, Any] | None, ...]) -> Any:
        client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {os.environ.get('VLLM_API_KEY')}"},
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=MAX_SEQUENCES),
            verify=self.url.startswith("https:"),  # reading the certificates takes a while
            trust_env=False,  # no proxy
        )
        async with client:
            asked = [self._request(client, f"{self.url}{path}", body) for body in bodies]
            return await asyncio.gather(*asked)

    async def _request(
        self, client: httpx.AsyncClient, url: str, body: dict[str, Any] | None
    ) -> httpx.Response:
        """Return the answer; wait for a server that is down as long as TRL's setting allows."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                return await client.request("GET" if body is None else "POST", url, json=body)
            except (httpx.HTTPError, httpx.InvalidURL) as exc:
                is_down = isinstance(exc, httpx.ConnectError | httpx.ConnectTimeout)
                if not is_down or time.monotonic() >= deadline:
                    reason = f"{self.name} is away ({first_line(exc)})"
                    raise GenerationError(f"{reason}: look at its log, or {self._remedy}") from exc
            wait = f"waiting up to {self._patience:g} s for {self.name}: {self._remedy}"
            warnings.warn(wait, UserWarning, stacklevel=2)
            await asyncio.sleep(1)

    def _read(self, answer: httpx.Response, read: Callable[[Any], Any] | None = None) -> Any:
        """Return the result of ``read`` on the JSON of an answer; raise GenerationError."""
        if answer.is_success:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                return read and read(answer.json())
        try:
            text = answer.json()["error"]["message"]
        except (ValueError, LookupError, TypeError):
            text = answer.text
        remedy = f"look at its log, correct what it names, or {self._remedy}"
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            remedy = "put its key into the environment variable VLLM_API_KEY"
        elif "No adapter found" in text:
            remedy = "set trainer.vllm_adapter_dir to a folder that both machines see"
        what = f"{answer.status_code} ({first_line(Exception(text))})"
        raise GenerationError(f"{self.name} answers {what}: {remedy}")


def _completion(found: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Return the token ids and log-probabilities of an answer of ``/v1/completions``."""
    (choice,) = found["choices"]
    return list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
