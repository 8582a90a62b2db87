"""``rloo-kit export``: a trained model as adapter, merged weights, GGUF, or on the hub.

What was written is loaded back and must answer as the trained model does; a folder that does not is
removed.
"""

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rloo_kit.diagnosis.record import read_json, read_run
from rloo_kit.errors import ConfigError, KitError, ModelError
from rloo_kit.evaluation.models import LoadedBase, TrainedModel, find_trained, load_base
from rloo_kit.export.llama_cpp import DTYPES, find_converter, modelfile, quoted, write_gguf
from rloo_kit.export.model_card import CardFacts, is_hub_name, model_card
from rloo_kit.export.verify import Agreement, Answers, ask, compare, default_prompts
from rloo_kit.machine.environment import setup
from rloo_kit.machine.memory import session
from rloo_kit.models.gguf import convert
from rloo_kit.models.loading import load_model
from rloo_kit.models.shape import TINY_THINKER
from rloo_kit.output_folder import free_folder, write_json
from rloo_kit.text.redaction import redact, redacting
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.training.preparation import read_prompts, template_settings

Say = Callable[[str], None]

KINDS = ("adapter", "merged", "gguf", "ollama", "hub")
# `--base`: the 4-bit base that the run trained on, its weights written out in 16 bit
DEQUANTIZED = "dequantized"
# Largest mean difference of a token's log-probability, in nats, in float32 on a CPU
TOLERANCES = {"adapter": 0.001, "bf16": 0.03, "f16": 0.03, "q8_0": 0.06}
# Added on a GPU, where models stay in 16 bit, which rounds every layer's output
GPU_TOLERANCE = 0.03
# Of an answer that is compared
MAX_TOKENS = 48
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "spiece.model")  # fmt: skip
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors", "*.index.json",
               "*.gguf")  # fmt: skip
# Nothing else of a folder is sent to the hub
UPLOADED = (*TOKENIZER_FILES, *ADAPTER_FILES, *MODEL_FILES, "README.md", "Modelfile")
# Files that could name a folder of this machine or hold a secret
TEXT_FILES = ("README.md", "*config.json", "Modelfile")


@dataclass(frozen=True)
class Exported:
    """What was written."""

    kind: str
    folder: Path | None
    """None for the hub."""
    agreement: Agreement | None = None
    """With the trained model on the same base; None where it was not checked."""
    rebased: Agreement | None = None
    """Of the adapter on the 16-bit base with the adapter on the 4-bit base that it trained on."""
    url: str | None = None
    """On the hub; None where nothing was sent."""


def export_model(  # noqa: PLR0913
    run: str | Path,
    to: str = "merged",
    *,
    output: str | Path | None = None,
    dtype: str = "bf16",
    base: str | None = None,
    converter: str | Path | None = None,
    repo: str | None = None,
    public: bool = False,
    yes: bool = False,
    check: bool = True,
    num_prompts: int = 16,
    say: Say = print,
) -> Exported:
    """Write a trained model in the form that something else takes, with a model card.

    Args:
        run: A run, a checkpoint or an adapter; for ``hub`` also an exported folder.
        to: ``adapter`` (PEFT), ``merged`` (16-bit safetensors), ``gguf`` (llama.cpp), ``ollama``
            (GGUF and a Modelfile) or ``hub``.
        output: The new folder, numbered if it exists; None: ``export-TO`` next to the adapter.
        dtype: Of a GGUF file: ``bf16``, ``f16`` or ``q8_0``.
        base: What the adapter is merged into, a 16-bit name or folder, or ``dequantized``: the
            4-bit base of the run, written out. Of an adapter: the name that it gives its base.
        converter: llama.cpp's folder or its ``convert_hf_to_gguf.py``.
        repo: ``OWNER/NAME`` on the hub.
        public: Let everybody see it there.
        yes: Send it; False lists what would be sent.
        check: Load what was written and compare its answers.
        num_prompts: That are compared.
        say: Called with each line for the user.

    Raises:
        ConfigError: The arguments do not fit, or there is no converter.
        ModelError: It cannot be loaded, merged, converted or sent, or answers otherwise.
    """
    say = redacting(say)
    _check_arguments(to, dtype, repo, num_prompts)
    trained = find_trained(run)
    setup(trained.model.backend)
    if to == "hub":
        return _to_hub(trained, repo or "", base, public=public, yes=yes, check=check, say=say)
    if trained.adapter is None:
        raise ConfigError(
            f"{format_value(str(run))} is no trained model: give the folder of a run or of an "
            "adapter"
        )
    command = find_converter(converter) if to in ("gguf", "ollama") else []
    goal = free_folder(output or trained.adapter.parent / f"export-{to}")
    export = _Export(trained, trained.adapter, to, base, num_prompts if check else 0, say)
    with _whole_folder(goal) as folder:
        if to == "adapter":
            done = export.adapter_files(folder)
        elif to == "merged":
            done = export.merged(folder)
        else:
            done = export.gguf(folder, dtype, command)
    say(f"{to} written to {goal}")
    return replace(done, folder=goal)


def _check_arguments(to: str, dtype: str, repo: str | None, num_prompts: int) -> None:
    if to not in KINDS:
        raise ConfigError(f"a model is exported to {', '.join(KINDS)}, not to {format_value(to)}")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is {format_value(dtype)}, must be one of {', '.join(DTYPES)}")
    if to == "hub" and (repo is None or not is_hub_name(repo)):
        raise ConfigError(
            f"the name on the hub is {format_value(repo)}: give one as OWNER/NAME, with --repo"
        )
    if num_prompts < 1:
        raise ConfigError(f"{num_prompts} prompts compare nothing: give 1 or more, or --no-check")


@contextlib.contextmanager
def _whole_folder(goal: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``goal`` when the body has ended."""
    from safetensors import SafetensorError

    part = goal.with_name(f".{goal.name}.partial")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        part.rename(goal)
    except (OSError, SafetensorError) as exc:
        raise ModelError(
            f"{format_value(str(goal))} cannot be written ({first_line(exc)}): free some space, or "
            "choose another folder with --output"
        ) from exc
    finally:
        shutil.rmtree(part, ignore_errors=True)


# --- the kinds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Export:
    """One export."""

    trained: TrainedModel
    adapter: Path
    kind: str
    base: str | None
    num_prompts: int
    """That are compared; 0: it is not checked."""
    say: Say

    def adapter_files(self, folder: Path) -> Exported:
        """Copy the adapter, with the name that others know its base by."""
        name = self.base or base_name(self.trained)
        copy_adapter(self.adapter, folder, name)
        if Path(name).exists():
            self.say(
                f"note: the adapter names its base by a folder of this machine, {name}: name it "
                f"for others with --base"
            )
        agreement = None
        if self.num_prompts:
            with session():
                both = load_base(self.trained)
                if not any(folder.glob("tokenizer*")):  # a checkpoint has none
                    both.tokenizer.save_pretrained(str(folder))
                with both.using(self.trained) as model:
                    before = self._ask(model, both.tokenizer)
                with both.using(replace(self.trained, adapter=folder)) as model:
                    agreement = compare(before, model, _tokenizer_in(folder))
            self._check(agreement, TOLERANCES["adapter"])
        self._write_card(folder, name, [])
        return Exported("adapter", None, agreement)

    def merged(self, folder: Path) -> Exported:
        """Merge the adapter into its base in 16 bit."""
        reference, rebased, notes, name = self._merge(folder)
        agreement = self._load_back(folder, reference, TOLERANCES["bf16"])
        self._write_card(folder, name, notes)
        return Exported(self.kind, None, agreement, rebased)

    def gguf(self, folder: Path, dtype: str, command: list[str]) -> Exported:
        """Merge, convert; and for Ollama a Modelfile."""
        file = folder / f"{_title(self.trained)}-{dtype}.gguf"
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=folder.parent) as place:
            model = Path(place) / "model"
            model.mkdir()
            reference, rebased, notes, name = self._merge(model)
            self.say(f"converting into {file.name}")
            write_gguf(model, file, dtype, command)
            agreement = None
            if reference is not None:
                back = convert(file, Path(place) / "back")
                agreement = self._load_back(back, reference, TOLERANCES[dtype])
            if self.kind == "ollama":
                self._write_modelfile(folder / "Modelfile", file.name, model)
        self._write_card(folder, name, notes)
        return Exported(self.kind, None, agreement, rebased)

    def _write_modelfile(self, path: Path, file: str, model: Path) -> None:
        tokenizer, config = _tokenizer_in(model), self.trained.config
        ends = (read_json(model / "generation_config.json") or {}).get("eos_token_id") or []
        ends = ends if isinstance(ends, list) else [ends]
        text, known = modelfile(
            file,
            tokenizer,
            [quoted(tokenizer.decode([end])) for end in ends],
            temperature=(config.trainer.get("temperature") if config else None) or 1.0,
            num_ctx=self.trained.model.max_seq_length,
        )
        path.write_text(text, encoding="utf-8")
        if not known:
            self.say(
                "note: the chat template is not ChatML, so Ollama takes the GGUF file's own: see "
                "that its answers are as here"
            )
        self.say(f"next: ollama create {_title(self.trained).lower()} -f Modelfile, in that folder")

    def _merge(self, folder: Path) -> tuple[Answers | None, Agreement | None, list[str], str]:
        """Write merged weights.

        Returns:
            The answers on the 16-bit base before merging, how they agree with those on the 4-bit
            base, notes for the card, and the name of the base.
        """
        import torch

        before, rebased, reference = None, None, None
        # Without the run's settings nobody knows on which base it was trained.
        if self.num_prompts and self.trained.config and self.trained.model.load_in_4bit:
            with session():
                as_trained = load_base(self.trained)
                with as_trained.using(self.trained) as model:
                    before = self._ask(model, as_trained.tokenizer)
        with session():
            sixteen, name, notes = _base_in_16_bit(self.trained, self.base, self.say)
            if sixteen.model.device.type == "cpu":
                sixteen.model.float()  # one rounding, at the end
            with sixteen.using(self.trained) as model:
                if self.num_prompts:
                    reference = self._ask(model, sixteen.tokenizer)
                if before is not None:
                    rebased = compare(before, model, sixteen.tokenizer)
            merged = sixteen.model.merge_and_unload().to(torch.bfloat16)
            _save(merged, self.adapter, sixteen.tokenizer, folder)
        if rebased is not None:
            note = "The policy was trained on the base in 4 bits. On the base in 16 bit, "
            notes = [*notes, f"{note}{rebased}."]
            self.say(f"on the base in 16 bit, compared with the 4-bit one of the run: {rebased}")
        return reference, rebased, notes, name

    def _load_back(
        self, folder: Path, reference: Answers | None, tolerance: float
    ) -> Agreement | None:
        """Load what was written and compare its answers."""
        if reference is None:
            return None
        how = self.trained.model
        with session():
            model, tokenizer = load_model(
                folder,
                max_seq_length=how.max_seq_length,
                load_in_4bit=False,
                backend=how.backend,
                trust_remote_code=how.trust_remote_code,
            )
            on_cpu = model.device.type == "cpu"
            if on_cpu:
                model.float()
            agreement = compare(reference, model, tokenizer)
        self._check(agreement, tolerance + (0 if on_cpu else GPU_TOLERANCE))
        return agreement

    def _check(self, agreement: Agreement, tolerance: float) -> None:
        if not agreement.difference <= tolerance:  # NaN too
            raise ModelError(
                f"the export does not answer as before ({agreement}; at most {tolerance:g} is "
                f"allowed) and was removed: keep it with --no-check to look at it"
            )
        self.say(f"loaded back: {agreement} (at most {tolerance:g})")

    def _ask(self, model: Any, tokenizer: Any) -> Answers:
        """Ask held-out prompts of the run, else general ones."""
        config, rows, settings, most = self.trained.config, [], {}, MAX_TOKENS
        if config is not None:
            with contextlib.suppress(KitError):  # its file was removed
                train, held_out = read_prompts(config, Path())
                rows = [row["prompt"] for row in (held_out if held_out is not None else train)]
            settings = template_settings(config)
            most = min(most, config.trainer.get("max_completion_length") or most)
        prompts = (rows or default_prompts(tokenizer))[: self.num_prompts]
        return ask(model, tokenizer, prompts, settings, max_tokens=most)

    def _write_card(self, folder: Path, base: str, notes: list[str]) -> None:
        from rloo_kit import __version__

        run = self.trained.run
        facts = CardFacts(
            kind=self.kind,
            name=_title(self.trained),
            base=base,
            licence=licence_of(base),
            record=read_run(run) if run else None,
            environment=(read_json(run / "environment.json") if run else {}) or {},
            version=__version__,
            notes=tuple(notes),
        )
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def _base_in_16_bit(
    trained: TrainedModel, base: str | None, say: Say
) -> tuple[LoadedBase, str, list[str]]:
    """Return the base to merge into, its name, and notes for the card."""
    name, found = base or trained.base, None
    if base == DEQUANTIZED:
        name, found = trained.base, load_base(trained, load_in_4bit=True)
    elif (whole := re.sub(r"(-unsloth)?-bnb-4bit$", "", name)) != name and is_hub_name(name):
        try:
            found, name = load_base(replace(trained, base=whole), load_in_4bit=False), whole
        except ModelError as exc:
            say(f"note: the unquantised base {whole} is not available ({exc})")
    if found is None:
        found = load_base(replace(trained, base=name), load_in_4bit=False)
    if not getattr(found.model, "is_quantized", False):
        return found, name, []
    note = (
        "The adapter was merged into 4-bit weights written out in 16 bit: what quantisation took "
        "from the base is lost."
    )
    if base != DEQUANTIZED:
        say(f"note: {note} Give the unquantised base with --base")
    return LoadedBase(found.model.dequantize(), found.tokenizer), name, [note]


def _save(model: Any, adapter: Path, tokenizer: Any, folder: Path) -> None:
    model.config.use_cache = True  # off while it trained
    model.save_pretrained(str(folder))
    if any(adapter.glob("tokenizer*")):
        tokenizer = _tokenizer_in(adapter)
    if longest := getattr(model.config, "max_position_embeddings", None):
        tokenizer.model_max_length = longest  # not the run's max_seq_length
    tokenizer.save_pretrained(str(folder))


def copy_adapter(adapter: Path, folder: Path, base: str) -> None:
    """Copy an adapter and its tokenizer, and name its base.

    Raises:
        ModelError: Its config cannot be read.
    """
    for file in _matching(adapter, (*ADAPTER_FILES, *TOKENIZER_FILES)):
        shutil.copyfile(file, folder / file.name)
    config_file, weights = (folder / name for name in ADAPTER_FILES)
    config = read_json(config_file)
    if config is None or not weights.is_file():
        raise ModelError(f"the adapter in {format_value(str(adapter))} is not whole: save it again")
    write_json(config_file, config | {"base_model_name_or_path": base}, indent=2)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern)})


def _tokenizer_in(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)


def _title(trained: TrainedModel) -> str:
    folder = trained.run or trained.adapter or Path("model")
    text = re.sub(r"[^\w.-]+", "-", f"{Path(trained.base).stem}-{folder.resolve().name}")
    return text.strip("-.") or "model"


def base_name(trained: TrainedModel) -> str:
    """Return what others know the base by; a folder of this machine stays one."""
    same = Path(trained.base).is_dir() and Path(trained.base).resolve() == TINY_THINKER.resolve()
    return "tiny-thinker" if same else trained.base


def licence_of(base: str) -> str:
    """Return the licence that the base's own card or file gives, else ``unknown``."""
    from huggingface_hub import HfApi, ModelCard

    with contextlib.suppress(Exception):  # no card, no network, no metadata
        place = TINY_THINKER if base == "tiny-thinker" else Path(base)
        if place.suffix == ".gguf":
            from gguf import GGUFReader

            found = GGUFReader(place).get_field("general.license")
            return str(found.contents()) if found else "unknown"
        data = ModelCard.load(place / "README.md").data if place.is_dir() else None
        data = data or HfApi().model_info(base).card_data
        return str((data and data.get("license")) or "unknown")
    return "unknown"


# --- the hub -------------------------------------------------------------------------------------


def _to_hub(  # noqa: PLR0913
    trained: TrainedModel,
    repo: str,
    base: str | None,
    *,
    public: bool,
    yes: bool,
    check: bool,
    say: Say,
) -> Exported:
    with tempfile.TemporaryDirectory(prefix="rloo-kit-hub-") as place:
        folder = Path(place)
        if trained.adapter is not None:
            num_prompts = 8 if check and yes else 0
            export = _Export(trained, trained.adapter, "adapter", base, num_prompts, say)
            export.adapter_files(folder)
        else:
            folder = Path(trained.base)
            if not (folder / "README.md").is_file():
                raise ConfigError(
                    f"{format_value(trained.name)} is neither a trained model nor an export with "
                    "its README.md: give a run, an adapter or an export-... folder"
                )
        files = _matching(folder, UPLOADED)
        _check_nothing_private(files, folder, trained)
        who = "everybody" if public else "you alone"
        say(f"{'sending' if yes else 'would send'} to {repo}, to be seen by {who}:")
        for file in files:
            say(f"  {file.stat().st_size:>13,} bytes  {file.name}")
        if not yes:
            say("nothing was sent: add --yes to send it")
            return Exported("hub", None)
        url = _upload(folder, files, repo, public=public)
    say(f"sent to {url}")
    return Exported("hub", None, url=url)


def _check_nothing_private(files: list[Path], folder: Path, trained: TrainedModel) -> None:
    """Refuse to send the name of a folder of this machine, or a secret.

    Raises:
        ConfigError: A text holds one.
    """
    places = {Path.home(), Path.cwd(), *(p.resolve().parent for p in (trained.run,) if p)}
    names = {str(place) for place in places if len(place.parts) > 1}
    if Path(trained.base).exists() and Path(trained.base) != folder:
        names.add(trained.base)
    for file in files:
        if not any(file.match(pattern) for pattern in TEXT_FILES):
            continue
        text = file.read_text(encoding="utf-8")
        if redact(text) != text:
            raise ConfigError(f"{file.name} holds what looks like a secret, and nothing was sent")
        if found := next((name for name in sorted(names) if name in text), None):
            raise ConfigError(
                f"{file.name} names a folder of this machine, {format_value(found)}, and nothing "
                "was sent: name the base as others know it, with --base OWNER/NAME"
            )


def _upload(folder: Path, files: list[Path], repo: str, *, public: bool) -> str:
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        url = api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(repo).private:
            raise ConfigError(
                f"{repo} exists and everybody can see it: add --public, or choose another name"
            )
        api.upload_folder(
            repo_id=repo,
            folder_path=str(folder),
            allow_patterns=[file.name for file in files],
            commit_message="Trained with rloo-kit",
        )
    except KitError:
        raise
    except Exception as exc:  # HTTP clients differ by version
        raise ModelError(
            f"{repo} could not be sent ({first_line(exc)}): check the network, and that HF_TOKEN "
            "in .env may write to it"
        ) from exc
    return str(url)
