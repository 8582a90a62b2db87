"""Functions that find, load and run reward models (sequence classifiers with one output).

A reward model is a whole model, or a PEFT adapter on a base model.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from rloo_kit.errors import KitError, ModelError
from rloo_kit.text.thoughts import completion_texts
from rloo_kit.text.wording import content_text, encodable, first_line
from rloo_kit.types import Completion, Model, Tokenizer

from ._text import THINK_CLOSE, THINK_OPEN, completion_text, text_after_thought

# Name of the kit's own model, which may be the base of an adapter
EMBEDDED = "tiny-thinker"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# File that `rloo-kit reward-model train` writes: the base model, and how texts are read
FACTS = "reward_model.json"
# File with the mean and the standard deviation of the model's scores
CALIBRATION = "calibration.json"
# Names of layers that are not quantised, since a head has only one output
HEADS = ("score", "classifier", "v_head", "lm_head", ".*pooler.*")
WHAT_TO_GIVE = "give a folder with config.json, weights and tokenizer, or a hub name"
FINGERPRINT_BYTES = 65536


@dataclass(frozen=True)
class Source:
    """Location of a reward model that has been found but not loaded."""

    name: str
    folder: Path  # does not exist if the model is on the hub
    facts: dict[str, Any]  # content of ``reward_model.json``; empty if there is no such file

    @property
    def is_adapter(self) -> bool:
        """True if it is a PEFT adapter, which needs a base model."""
        folder = self.folder
        return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()

    @property
    def place(self) -> str:
        """Folder or hub name from which transformers can load the model."""
        return self.folder.as_posix()


# --- finding -------------------------------------------------------------------------------------


def find_source(name: str) -> Source:
    """Return the location of the reward model that a folder or hub name refers to.

    Raises:
        ModelError: The name looks like a path, but there is no such folder.
    """
    folder = Path(name).expanduser()
    if _looks_like_path(name) and not folder.is_dir():
        raise ModelError(f"reward model {name!r} is not a folder; {WHAT_TO_GIVE}")
    return Source(name, folder, read_json(folder / FACTS))


def find_base(source: Source, base: str | None) -> str:
    """Return the folder or hub name of the base model. A whole model is its own base model.

    The folder of an adapter records the name of the base model, and the path from the adapter to
    the base model's folder. If ``base`` is given, it is used instead of both. Otherwise the
    recorded path is used if it leads to a folder. If it does not, the recorded name is used.

    Raises:
        ModelError: The base model is missing, or its weights differ from the weights on which the
            adapter was trained.
    """
    if not source.is_adapter:
        return source.place
    config = read_json(source.folder / ADAPTER_CONFIG)
    given = base or source.facts.get("base") or config.get("base_model_name_or_path") or ""
    relative = None if base else source.facts.get("base_folder")
    found = Path(given).expanduser() if given else None
    if given == EMBEDDED:
        found = Path(str(files("rloo_kit"))) / "assets" / EMBEDDED
    elif relative and (source.folder / relative).is_dir():
        found = (source.folder / relative).resolve()
    if found is not None and found.is_dir():
        noted = source.facts.get("base_fingerprint")
        if noted and noted != fingerprint(found):
            raise ModelError(
                f"reward model {source.name!r} was trained on base model {given!r}, but other "
                f"weights are now in {str(found)!r}; give the folder with the original weights as "
                "base, or train the reward model again"
            )
        return str(found)
    if not given or relative or _looks_like_path(given):
        raise ModelError(
            f"reward model {source.name!r} is an adapter on {given!r}, which is missing; give the "
            "folder of that model as base"
        )
    return given


def fingerprint(folder: Path) -> str:
    """Return a digest that identifies a model's weights.

    It is computed from the name, the size, and the first and last 64 KiB of each safetensors file.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as content:
            digest.update(f"{file.name} {size} ".encode() + content.read(FINGERPRINT_BYTES))
            content.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(content.read())
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file as a dict, which is empty if there is no such file.

    Raises:
        ModelError: The file cannot be read, or does not hold a JSON object.
    """
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError) as exc:
        raise ModelError(f"{str(path)!r} cannot be read ({exc}); write it again") from exc


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_absolute()


# --- loading -------------------------------------------------------------------------------------


def load_classifier(source: Source, base: str, *, load_in_4bit: bool, device: str) -> Any:
    """Load a reward model, in evaluation mode.

    Args:
        source: Location of the model, from ``find_source``.
        base: Location of its base model, from ``find_base``.
        load_in_4bit: Quantise the weights to NF4 with bitsandbytes, except the head.
        device: Device of 4-bit weights. Other weights are loaded to main memory.

    Raises:
        ModelError: The model has no trained score weights.
    """
    saved = _adapter_keys(source) if source.is_adapter else set()
    model: Any
    model, missing = load_base(base, load_in_4bit=load_in_4bit, device=device)
    if missing := missing - saved:
        raise ModelError(
            f"reward model {source.name!r} has no trained weights for "
            f"{', '.join(sorted(missing))}; give a sequence classifier with one output"
        )
    if source.is_adapter:
        from peft import PeftModel

        target = device if load_in_4bit else "cpu"
        model = PeftModel.from_pretrained(model, source.place, torch_device=target)
    return model.eval()


@contextlib.contextmanager
def loading(what: str, place: str) -> Iterator[None]:
    """Hide transformers' reports while the body loads a model, and convert errors to ModelError.

    The reports would warn about the missing head of a base model, which is expected.

    Args:
        what: What is loaded, as the beginning of an error message.
        place: Folder or hub name from which it is loaded.

    Raises:
        ModelError: The body raised an exception that is not a ``KitError``.
    """
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if Path(place).is_dir():
        logging.disable_progress_bar()
    try:
        yield
    except KitError:
        raise
    except Exception as exc:  # what is raised differs by library, version and network
        if "trust_remote_code" in str(exc):
            fault = (
                "it needs code of its own, which is never run for a reward: give a model whose "
                "architecture transformers has"
            )
        elif "use_safetensors=True" in str(exc):
            fault = "it has no safetensors: load it with transformers, then call save_pretrained"
        else:
            fault = f"{first_line(exc)}: {WHAT_TO_GIVE} (which needs a network connection)"
        raise ModelError(f"{what} cannot be loaded: {fault}") from exc
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def load_base(place: str, *, load_in_4bit: bool, device: str) -> tuple[Any, set[str]]:
    """Load a sequence classifier with one output; return it and the names of missing weights.

    A weight is missing if it is not in the model's files. Then its values are untrained.

    Args:
        place: Folder or hub name of the model.
        load_in_4bit: Quantise the weights to NF4 with bitsandbytes, except the head.
        device: Device of 4-bit weights; other weights are on the CPU. For ``cpu``, weights that are
            not quantised are in float32.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification, BitsAndBytesConfig

    settings: dict[str, Any] = {"dtype": torch.float32 if device == "cpu" else "auto"}
    config = AutoConfig.from_pretrained(place, trust_remote_code=False, num_labels=1)
    packed = getattr(config, "quantization_config", None)  # 4 bit on disk
    dtype = torch.float32
    if packed is not None or load_in_4bit:
        if device != "cpu":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
            dtype = torch.bfloat16 if native else torch.float16
        settings = {"dtype": dtype, "device_map": {"": device}}
    if packed is not None:
        packed["llm_int8_skip_modules"] = [*(packed.get("llm_int8_skip_modules") or ()), *HEADS]
        packed["bnb_4bit_compute_dtype"] = dtype  # the file has bf16, which old cards only emulate
    elif load_in_4bit:
        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=list(HEADS),
        )
    model, info = AutoModelForSequenceClassification.from_pretrained(
        place,
        config=config,
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        **settings,
    )
    for module in model.modules():
        # On a CPU bitsandbytes repacks for inference, which is coarser and ends gradients
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model, set(info["missing_keys"])


def _adapter_keys(source: Source) -> set[str]:
    """Return the names of the weights in an adapter's file, without PEFT's prefix.

    Raises:
        ModelError: The adapter is for another task, or its weights are missing.
    """
    from safetensors import safe_open

    config = read_json(source.folder / ADAPTER_CONFIG)
    if config.get("task_type") != "SEQ_CLS":
        raise ModelError(
            f"reward model {source.name!r} is an adapter for {config.get('task_type')!r}; give "
            "one for 'SEQ_CLS', such as `rloo-kit reward-model train` writes"
        )
    weights = source.folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        raise ModelError(
            f"reward model {source.name!r} has no {ADAPTER_WEIGHTS}; save the adapter again"
        )
    with safe_open(str(weights), "pt") as file:
        return {key.removeprefix("base_model.model.") for key in file.keys()}  # noqa: SIM118


def set_up_tokenizer(model: Model, tokenizer: Tokenizer, name: str) -> None:
    """Set up a tokenizer in place: its pad token, padding on the right, and truncation on the left.

    Texts are truncated to the context length of the model.

    Args:
        model: The reward model. Its config gets the same pad token.
        tokenizer: The tokenizer of the reward model.
        name: Name of the reward model, for the error message.

    Raises:
        ModelError: The tokenizer has neither a pad token nor an EOS token.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(
                f"the tokenizer of reward model {name!r} has neither pad nor eos token; set "
                "pad_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    config = model.config.get_text_config()
    config.pad_token_id = tokenizer.pad_token_id
    limit = getattr(config, "max_position_embeddings", tokenizer.model_max_length)
    tokenizer.model_max_length = min(limit, tokenizer.model_max_length)
    tokenizer.truncation_side = "left"
    tokenizer.padding_side = "right"


# --- reading and scoring -------------------------------------------------------------------------


def token_ids(
    tokenizer: Tokenizer,
    prompt: Completion,
    completion: Completion,
    *,
    keep_thought: bool = False,
    max_length: int | None = None,
    completion_ids: list[int] | None = None,
) -> list[int]:
    """Return the token ids of a prompt and a completion, as the input of a reward model.

    Scoring and the training of the reward model both use this function.

    Args:
        tokenizer: Tokenizer of the reward model, after ``set_up_tokenizer``.
        prompt: Plain text, or chat messages, which the tokenizer's chat template renders.
        completion: The completion to score, conversational or plain.
        keep_thought: Include the thought. False: only the text after the last ``</think>``.
        max_length: Maximum number of tokens; None: the tokenizer's limit.
        completion_ids: Token ids that the policy sampled, to be used as they are. None: the text of
            the completion is tokenized.

    Raises:
        ModelError: ``completion_ids`` come from another tokenizer.
    """
    if completion_ids is not None:
        return _own_ids(tokenizer, prompt, completion, completion_ids, max_length)
    answer = completion_text(completion)
    if not keep_thought and (THINK_OPEN in answer or THINK_CLOSE in answer):
        answer = text_after_thought(answer).lstrip("\n")  # as chat templates cut it
    has_template = not isinstance(prompt, str) and bool(tokenizer.chat_template)
    if isinstance(prompt, str):
        text = prompt + answer
    elif has_template:
        text = _rendered(tokenizer, prompt, answer, keep_thought=keep_thought)
    else:
        text = "\n".join([*(content_text(turn.get("content")) for turn in prompt), answer])
    # A template writes the special tokens itself
    ids = tokenizer.encode(
        encodable(text), add_special_tokens=not has_template, truncation=True, max_length=max_length
    )
    # A model cannot read a row without a token: an empty completion of an empty prompt
    return ids or [tokenizer.pad_token_id]


def _own_ids(
    tokenizer: Tokenizer,
    prompt: Completion,
    completion: Completion,
    completion_ids: list[int],
    max_length: int | None,
) -> list[int]:
    (read,) = completion_texts(tokenizer, [completion_ids])
    if read != completion_text(completion):
        raise ModelError(
            f"policy_tokens is set, but the reward model's tokenizer is not the policy's: it "
            f"decodes the policy's token ids to {read[:80]!r} instead of "
            f"{completion_text(completion)[:80]!r}; set policy_tokens to false"
        )
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
    return [*ids, *completion_ids][-(max_length or tokenizer.model_max_length) :]


def _rendered(tokenizer: Tokenizer, prompt: list[Any], answer: str, *, keep_thought: bool) -> str:
    """Return the prompt and the answer as text, rendered by the tokenizer's chat template.

    Many templates remove the thought from an answer. If the thought must be kept, such a template
    renders only the prompt, and the answer and the end-of-sequence token are appended to it. If the
    rendered prompt ends with ``<think>``, a leading ``<think>`` of the answer is removed.
    """
    if not keep_thought or not _drops_thoughts(tokenizer):
        turn = [*prompt, {"role": "assistant", "content": answer}]
        return str(tokenizer.apply_chat_template(turn, tokenize=False))
    opened = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
    if opened.rstrip().endswith(THINK_OPEN):
        answer = answer.lstrip().removeprefix(THINK_OPEN).lstrip("\n")
    return opened + answer + (tokenizer.eos_token or "")


def _drops_thoughts(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template removes the thought of the last answer."""
    thought = "a thought to look for"
    turn = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": f"{THINK_OPEN}\n{thought}\n{THINK_CLOSE}\n\n."},
    ]
    return thought not in str(tokenizer.apply_chat_template(turn, tokenize=False))


def batches(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield batches of row numbers, so that the rows of a batch have similar lengths.

    The longest rows come first. A batch has at most ``tokens_per_batch`` tokens, padding included.
    A row that is longer than this is a batch of its own.

    >>> list(batches([3, 9, 4, 1], tokens_per_batch=8))
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    while order:
        rows = max(1, tokens_per_batch // lengths[order[0]])
        yield order[:rows]
        order = order[rows:]


def logits(
    model: Model,
    pad_token_id: int,
    rows: Sequence[list[int]],
    tokens_per_batch: int,
    *,
    at_last_token: bool = False,
) -> list[float]:
    """Run the model and return its only output, the logit, for each row in order.

    Args:
        model: The model, on the device on which it must run.
        pad_token_id: Pad token in the model's config.
        rows: Token ids of each row; a row must not be empty.
        tokens_per_batch: Maximum number of tokens in a forward pass, padding included.
        at_last_token: Read the logit at the last token of each row, even if it is the pad token.
            False: read it at the last token that is not the pad token.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    config = model.config.get_text_config()
    found = [0.0] * len(rows)
    with torch.inference_mode():
        for batch in batches(list(map(len, rows)), tokens_per_batch):
            # transformers reads the logit at the last token that is not the pad token; in models
            # that pad with EOS this is the token before the EOS
            ends = {rows[row][-1] for row in batch} if at_last_token else set()
            pads = (pad_token_id, *range(len(ends) + 1))
            config.pad_token_id = next(pad for pad in pads if pad not in ends)
            tokens = [torch.tensor(rows[row]) for row in batch]
            # ids and mask: (B, T)
            ids = pad_sequence(tokens, batch_first=True, padding_value=config.pad_token_id)
            mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
            # one logit a row: (B, 1)
            output = model(
                input_ids=ids.to(model.device), attention_mask=mask.to(model.device)
            ).logits
            for row, score in zip(batch, output[:, 0].float().tolist(), strict=True):
                found[row] = score
    return found
