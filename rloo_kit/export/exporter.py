"""``rloo-kit export``: writes a trained model as adapter, merged weights or GGUF file.

Every export has a model card. An export with merged weights is loaded back and compared with the
trained model; if their answers differ too much, the export is removed.
"""

import contextlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rloo_kit.data.lengths import drop_long_prompts
from rloo_kit.data.prompts import load_prompts
from rloo_kit.diagnosis.record import RunRecord, read_run
from rloo_kit.errors import ConfigError, KitError, ModelError
from rloo_kit.evaluation.trained import LoadedBase, TrainedModel, find_trained, load_base
from rloo_kit.export.llama_cpp import K_QUANTS, check_quantiser, find_converter, write_gguf
from rloo_kit.export.model_card import KINDS, is_hub_name, model_card, public_name
from rloo_kit.export.ollama import modelfile
from rloo_kit.export.verify import Answers
from rloo_kit.job import PreparedJob, template_settings
from rloo_kit.machine.cleanup import session
from rloo_kit.machine.environment import setup
from rloo_kit.machine.hardware import Hardware, detect_hardware
from rloo_kit.models.adapters import CONFIG, WEIGHTS
from rloo_kit.models.gguf import check_package, convert
from rloo_kit.models.loading import TOKENIZER, load_tokenizer
from rloo_kit.models.shape import weight_bytes
from rloo_kit.output_folder import free_folder, read_json, whole_folder, write_json
from rloo_kit.runs.child import call_in_child
from rloo_kit.text.redaction import redacting
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model, Say, Tokenizer

# Value of `--base` that means the run's own 4-bit base, converted back to 16 bit
DEQUANTIZED = "dequantized"
DTYPES = {"merged": ("bf16", "nf4"), "gguf": ("bf16", "f16", "q8_0", *K_QUANTS)}
# Tolerance for the mean absolute difference of a token's log-probability, in nats, in float32 on a
# CPU. Measured on SmolLM2-135M: bf16 0.004, q8_0 0.02, q5_k_m 0.17 to 0.20, q4_k_m 0.13 to 0.22,
# nf4 0.46. q4_k_m uses 5 bits in layers whose width is not a multiple of 256; q4_0, with 4 bits in
# every layer, gives 0.47.
TOLERANCES = {"bf16": 0.03, "f16": 0.03, "q8_0": 0.06, "q5_k_m": 0.4, "q4_k_m": 0.6, "nf4": 0.9}
# Added to the tolerance if the models stay in 16 bit (on a GPU), where every layer's output is
# rounded
IN_16_BIT_TOLERANCE = 0.03
# Share of the free memory that weights may use, so that activations fit too
MEMORY_SHARE = 0.9
# Suffix in the names of Unsloth's 4-bit copies of a model
PACKED_SUFFIX = re.compile(r"(-unsloth)?-bnb-4bit$")
TOKENIZER_FILES = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "spiece.model")  # fmt: skip
PROCESSOR_FILES = "*processor_config.json"  # of a vision model
NUM_PROMPTS = 16  # default number of prompts for the check
SPARE = 8  # number of prompts to read for each prompt of the check, since some may be too long


def export_model(  # noqa: PLR0913
    run: str | Path,
    to: str = "merged",
    *,
    output: str | Path | None = None,
    dtype: str | None = None,
    base: str | None = None,
    converter: str | Path | None = None,
    check: bool = True,
    num_prompts: int = NUM_PROMPTS,
    repo: str | None = None,
    public: bool = False,
    say: Say = print,
) -> Path:
    """Write a trained model in a format for other software, with a model card.

    Args:
        run: Folder of a run, a checkpoint or an adapter.
        to: ``adapter`` (PEFT), ``merged`` (safetensors), ``gguf`` (llama.cpp, Ollama) or ``hub``
            (the adapter, uploaded).
        output: Folder to create; if it exists, a number is added to the name. None uses
            ``export-TO`` next to the adapter, and ``export-adapter`` for ``hub``.
        dtype: Format of the weights. For a GGUF file: ``bf16``, ``f16``, ``q8_0``, ``q5_k_m`` or
            ``q4_k_m``. For merged weights: ``bf16`` or ``nf4``. None uses ``bf16``.
        base: For a merge, the base model to merge the adapter into: the name or folder of a 16-bit
            model, or ``dequantized`` for the run's 4-bit base converted back to 16 bit. For an
            exported adapter, the name of the base to write into its config. None uses the run's
            base. A hub model named ``...-bnb-4bit`` is replaced by its 16-bit original in a merge,
            if that can be loaded. ``dequantized`` always uses the 4-bit model.
        converter: Folder of llama.cpp, or path of its ``convert_hf_to_gguf.py``.
        check: If True, load the merged weights or the GGUF file back, and compare their
            log-probabilities of some answers with those of the unmerged adapter on the same base.
        num_prompts: Number of prompts for that comparison.
        repo: Hub repository ``OWNER/NAME`` to upload the export to, whatever its format. It is
            created if it does not exist. None uploads nothing, and is an error with ``hub`` or
            ``public``.
        public: If True, create the repository as public, otherwise as private.
        say: Function that is called with each line of output.

    Returns:
        The new folder.

    Raises:
        ConfigError: The arguments are wrong or contradict each other, or the converter or the
            quantiser is missing.
        ModelError: The model cannot be loaded, merged, converted or uploaded, the package ``gguf``
            is missing, or the export answers differently than the trained model.
    """
    say = redacting(say)
    _check_arguments(to, dtype, base, num_prompts, converter, check=check)
    if (to == "hub" or public or repo is not None) and not is_hub_name(repo or ""):
        given = "" if repo is None else f", not {format_value(repo)}"
        raise ConfigError(
            f"an upload needs the name of a repository{given}: give --repo OWNER/NAME"
        )
    kind = "adapter" if to == "hub" else to
    trained = find_trained(run)
    if trained.adapter is None:
        raise ConfigError(
            f"{format_value(str(run))} is not a trained model: give the folder of a run or of "
            "an adapter"
        )
    goal = free_folder(output or trained.adapter.parent / f"export-{kind}")
    export = _Export(
        trained,
        trained.adapter,
        kind,
        dtype or "bf16",
        base,
        converter,
        num_prompts if check else 0,
        say,
    )
    if kind == "adapter" or _fits(trained, base, setup(trained.model.backend).hardware):
        export.write(goal)
    else:
        say("the base in 16 bit does not fit into the GPU: the export runs on the CPU")
        hidden = {"CUDA_VISIBLE_DEVICES": ""}  # hides the GPUs from the process
        call_in_child(replace(export, say=print).write, (goal,), say, variables=hidden)
    if repo is not None:
        say(f"uploaded to {_upload(goal, repo, private=not public)}")
    return goal


def _fits(trained: TrainedModel, base: str | None, hardware: Hardware) -> bool:
    """Return True if the device has enough free memory for the weights of a merge.

    The memory of a CPU is not checked.
    """
    shape = trained.shape(name=trained.base if base in (None, DEQUANTIZED) else base)
    needed = weight_bytes(shape, in_4bit=False)
    if base == DEQUANTIZED:
        needed += weight_bytes(shape, in_4bit=True)
    return hardware.device == "cpu" or needed <= MEMORY_SHARE * hardware.free_memory


def _widen(model: Model) -> bool:
    """Convert a model on a CPU to float32 if that fits in memory; return True if it was done.

    In float32 the merged weights are rounded only once, when they are saved.
    """
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    fits = model.device.type == "cpu" and size <= MEMORY_SHARE * detect_hardware().free_memory
    if fits:
        model.float()
    return fits


def _upload(folder: Path, repo: str, *, private: bool) -> str:
    """Upload an export to a hub repository, and return the URL of the repository."""
    from httpx import HTTPError
    from huggingface_hub import HfApi

    try:
        place = HfApi().create_repo(repo, private=private, exist_ok=True)
        HfApi().upload_folder(repo_id=place.repo_id, folder_path=str(folder))
    except (HTTPError, OSError, ValueError) as exc:  # no network, no token, no write permission
        raise ModelError(
            f"the upload to {repo} failed ({first_line(exc)}): run `hf auth login`, then upload "
            f"the folder {folder} with `hf upload`"
        ) from exc
    return str(place)


def _check_arguments(
    to: str,
    dtype: str | None,
    base: str | None,
    num_prompts: int,
    converter: str | Path | None,
    *,
    check: bool,
) -> None:
    kinds = [*KINDS, "hub"]
    if to not in kinds:
        raise ConfigError(f"--to {format_value(to)} is unknown: give one of {', '.join(kinds)}")
    known = DTYPES.get(to, ())
    of_merges = (dtype, base == DEQUANTIZED, check, num_prompts)
    if not known and of_merges != (None, False, True, NUM_PROMPTS):
        raise ConfigError(
            "an adapter is copied without conversion or check: leave out --dtype, --base "
            "dequantized, --no-check and --prompts"
        )
    if dtype not in (None, *known):
        raise ConfigError(f"dtype is {format_value(dtype)}, must be one of {', '.join(known)}")
    if converter is not None and to != "gguf":
        raise ConfigError("--converter is used only with --to gguf: leave --converter out")
    check_quantiser(dtype or "")
    if to == "gguf" and check:  # the check reads the file
        check_package()
    if num_prompts < 1:
        raise ConfigError(f"--prompts is {num_prompts}: set it to 1 or more")


# --- the kinds -----------------------------------------------------------------------------------


@dataclass
class _Export:
    """One export: its arguments, and the steps that write it and collect notes about it."""

    trained: TrainedModel
    adapter: Path
    kind: str  # ``adapter``, ``merged`` or ``gguf``
    dtype: str
    base: str | None
    converter: str | Path | None
    num_prompts: int  # number of prompts for the comparison; 0 skips it
    say: Say
    notes: list[str] = field(default_factory=list)  # sentences for the model card

    @property
    def _title(self) -> str:
        """Title of the model card: the names of the base and of the run."""
        base = Path(self.trained.base).name.removesuffix(".gguf")
        text = f"{base}-{self.trained.short_name}"
        return re.sub(r"[^\w.-]+", "-", text).strip("-.") or "model"

    def write(self, goal: Path) -> None:
        """Write the export and its model card into the new folder ``goal``."""
        setup(self.trained.model.backend)
        has_vision = self._has_vision()
        with whole_folder(goal) as folder:
            base = self._copy_adapter(folder) if self.kind == "adapter" else self._merged(folder)
            about = (self._record(), self.notes, has_vision)
            card = model_card(self.kind, self._title, base, *about)
            (folder / "README.md").write_text(card, encoding="utf-8")
        self.say(f"{self.kind} written to {goal}")

    def _has_vision(self) -> bool:
        """Return True if the adapter is for a model with a vision part.

        Raises:
            ModelError: The adapter's weights are missing or damaged.
        """
        try:
            with safe_open(self.adapter / WEIGHTS, "numpy") as weights:
                return ".language_model." in str(weights.keys())
        except (OSError, SafetensorError) as exc:
            raise ModelError(
                f"the adapter in {format_value(str(self.adapter))} is incomplete: save it again"
            ) from exc

    def _record(self) -> RunRecord | None:
        """Return the run's record up to the step of the adapter; None without a run."""
        if self.trained.run is None:
            return None
        record = read_run(self.trained.run)
        step = re.fullmatch(r"checkpoint-(\d+)", self.adapter.resolve().name)
        if step is None:
            return record
        before = {"before": record.evaluation.get("before")}
        return replace(record, end={"steps": int(step[1])}, evaluation=before)

    def _copy_adapter(self, folder: Path) -> str:
        """Copy the adapter's files, and return the name of the base in the copied config."""
        name = self.base or self.trained.base
        _copy(self.adapter, folder, CONFIG, WEIGHTS)
        _copy_tokenizer(self.adapter, folder)
        config: Any = read_json(folder / CONFIG)  # not None: `trained` has read this file
        if not (folder / TOKENIZER).is_file():
            self._add_tokenizer(folder)
        config["base_model_name_or_path"] = name
        if name != self.trained.base:
            config["revision"] = None  # it is a revision of the other model
        write_json(folder / CONFIG, config, indent=2)
        if Path(name).exists():
            self.say(
                f"note: the adapter's config names its base as a folder on this machine, {name}: "
                f"set a name that is valid elsewhere with --base"
            )
        return name

    def _add_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of the run into the folder, because a checkpoint has none.

        The base's own tokenizer is not used, since it may have another chat template.
        """
        _copy_tokenizer(Path(self.trained.run or self.adapter, "adapter"), folder)
        if not (folder / TOKENIZER).is_file():
            try:
                PreparedJob(self.trained.config).tokenizer.save_pretrained(str(folder))
            except KitError as exc:
                self.say(f"note: the export has no tokenizer ({exc})")

    def _merged(self, folder: Path) -> str:
        """Merge the adapter, convert the weights to ``dtype``, and check them.

        A GGUF file gets a Modelfile. Returns the name of the base.
        """
        is_gguf = self.kind == "gguf"
        command = find_converter(self.converter) if is_gguf else []
        with tempfile.TemporaryDirectory(prefix=".merged-", dir=folder.parent) as place:
            merged = Path(place) / "model" if is_gguf or self.dtype == "nf4" else folder
            name, reference = self._merge(merged)
            file = folder / f"{self._title}-{self.dtype}.gguf"
            if is_gguf:
                self.say(f"converting into {file.name}")
                write_gguf(merged, file, self.dtype, command)
                text = modelfile(file.name, self._tokenizer(merged), self.trained.config)
                (folder / "Modelfile").write_text(text, encoding="utf-8")
            elif self.dtype == "nf4":
                with session():
                    packed = load_base(self.trained, name=str(merged), load_in_4bit=True)
                    packed.model.config.use_cache = True
                    packed.model.save_pretrained(str(folder))
                self._tokenizer(merged).save_pretrained(str(folder))
                _copy(merged, folder, PROCESSOR_FILES)
                self.notes.append("The merged weights were rounded to 4 bits (NF4).")
            if reference is not None:
                back = convert(file, Path(place) / "back") if is_gguf else folder
                self._load_back(back, reference)
        return name

    def _merge(self, folder: Path) -> tuple[str, Answers | None]:
        """Merge the adapter into its base in 16 bit, and save the weights in ``folder``.

        Returns:
            The name of the base, and the answers of the adapter on the 16-bit base before the merge
            (None without a check).
        """
        import torch

        with session():
            sixteen, name = self._base_in_16_bit()
            tokenizer = sixteen.tokenizer
            _widen(sixteen.model)
            reference = None
            with sixteen.using(self.trained) as model:
                if self.num_prompts:
                    prompts = self._prompts(tokenizer)
                    settings = template_settings(self.trained.config)
                    reference = Answers(model, tokenizer, prompts, settings)
            merged = sixteen.model.merge_and_unload().to(torch.bfloat16)
            merged.config.use_cache = True  # it was off during training
            # transformers changes the layout of weights when it loads them, and
            # `save_original_format` undoes the change. That is not possible for weights that were
            # converted from 4 bit. `_base_in_16_bit` has added a note about such weights.
            merged.save_pretrained(str(folder), save_original_format=not self.notes)
            if hasattr(merged.config, "vision_config"):  # vLLM needs its processor for texts too
                _copy_from_model(merged.name_or_path, folder, PROCESSOR_FILES)
            _copy(self.adapter, folder, PROCESSOR_FILES)
            if any(self.adapter.glob("tokenizer*")):
                tokenizer = self._tokenizer(self.adapter)
            if longest := getattr(merged.config.get_text_config(), "max_position_embeddings", None):
                tokenizer.model_max_length = longest  # not the run's max_seq_length
            tokenizer.save_pretrained(str(folder))
        own, other = (PACKED_SUFFIX.sub("", public_name(n)) for n in (self.trained.base, name))
        if own != other:
            note = (
                f"The adapter was trained on {public_name(self.trained.base)} and merged into "
                f"{public_name(name)}. All scores were measured on "
                f"{public_name(self.trained.base)}."
            )
            self.say(
                f"note: {note} The check compares with the unmerged adapter on {public_name(name)}"
            )
            self.notes.append(note)
        elif self.trained.run and self.trained.model.load_in_4bit and not self.notes:
            self.notes.append(
                "The adapter was trained on the base in 4 bits; outputs differ slightly with the "
                "16-bit base."
            )
        return name, reference

    def _base_in_16_bit(self) -> tuple[LoadedBase, str]:
        """Load the base model to merge into, in 16 bit, and return it and its name.

        If only 4-bit weights are available, they are converted to 16 bit, and a note says so.
        """
        trained = self.trained
        name = self.base or trained.base
        found = None
        if self.base == DEQUANTIZED:
            name = trained.base
            found = load_base(trained, load_in_4bit=True)
        elif (whole := PACKED_SUFFIX.sub("", name)) != name and is_hub_name(name):
            try:
                found = load_base(trained, name=whole, load_in_4bit=False)
                name = whole
            except ModelError as exc:
                self.say(f"note: the unquantised base {whole} is not available ({exc})")
        if found is None:
            found = load_base(trained, name=name, load_in_4bit=trained.shape(name=name).packed)
        if getattr(found.model, "is_quantized", False):
            note = (
                "The adapter was merged into 4-bit weights written out in 16 bit, which lack the "
                "precision that the base lost by quantisation."
            )
            if self.base != DEQUANTIZED:
                self.say(f"note: {note} Give the unquantised base with --base")
            self.notes.append(note)
            found.model = found.model.dequantize()
        return found, name

    def _load_back(self, folder: Path, reference: Answers) -> None:
        """Load the export back and compare its answers with those from before the merge.

        Raises:
            ModelError: The log-probabilities differ by more than the tolerance.
        """
        tolerance = TOLERANCES[self.dtype]
        packed = self.dtype == "nf4"
        with session():
            # chat_template=None loads the exported chat template
            both = load_base(
                self.trained, name=str(folder), load_in_4bit=packed, chat_template=None
            )
            if packed or not _widen(both.model):
                tolerance += IN_16_BIT_TOLERANCE
            difference = reference.difference(both.model, both.tokenizer)
        found = f"log-probabilities differ by {difference:.4f} nats per token"
        if not difference <= tolerance:  # NaN too
            raise ModelError(
                f"the export was removed, because it differs from the trained model ({found}, and "
                f"at most {tolerance:g} is allowed): pass --no-check to keep it"
            )
        self.say(f"loaded back: {found} (at most {tolerance:g})")

    def _tokenizer(self, folder: Path) -> Tokenizer:
        """Load the tokenizer in a folder. Its own code may run if the run trusts remote code."""
        return load_tokenizer(folder, trust_remote_code=self.trained.model.trust_remote_code)

    def _prompts(self, tokenizer: Tokenizer) -> list[Any]:
        """Return prompts for the comparison, without prompts that are too long for the run.

        They are held-out prompts of the run, or training prompts if none were held out. Without a
        run, or if its prompts cannot be read, they are generated arithmetic prompts.
        """
        if self.trained.run is not None:
            with contextlib.suppress(KitError):  # the file of the prompts may be gone
                job = PreparedJob(self.trained.config, recorded=True)
                train, held_out = job.prompts
                found = train if held_out is None else held_out
                if job.prompt_limit is not None:
                    first = found.select(range(len(found))[: SPARE * self.num_prompts])
                    settings = template_settings(job.config)
                    found, _ = drop_long_prompts(first, tokenizer, job.prompt_limit, settings)
                return found["prompt"][: self.num_prompts]
        is_chat = bool(tokenizer.chat_template)
        return load_prompts("arithmetic", num_prompts=self.num_prompts, chat=is_chat)["prompt"][:]


def _copy_from_model(name: str, folder: Path, pattern: str) -> None:
    """Copy the files of a model whose names match a pattern to a folder.

    The files of a hub model are downloaded first. They are left out if that is not possible.

    Args:
        name: Folder of the model, or its name on the hub.
        folder: The folder to copy to.
        pattern: The pattern, as in a shell.
    """
    from httpx import HTTPError
    from huggingface_hub import snapshot_download

    source = Path(name)
    with contextlib.suppress(HTTPError, OSError, ValueError):
        if not source.is_dir():
            source = Path(snapshot_download(name, allow_patterns=pattern))
    _copy(source, folder, pattern)


def _copy(source: Path, folder: Path, *patterns: str) -> None:
    """Copy the files of a folder whose names match one of the patterns to another folder."""
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer and a processor, and the modules that their configs name."""
    from transformers.dynamic_module_utils import get_relative_import_files

    _copy(source, folder, PROCESSOR_FILES, *TOKENIZER_FILES)
    maps = [(read_json(file) or {}).get("auto_map") for file in source.glob("*_config.json")]
    for module in re.findall(r'"(\w+)\.\w+"', json.dumps(maps)):  # not modules on the hub
        if (file := source / f"{module}.py").is_file():
            others = get_relative_import_files(file)
            _copy(source, folder, file.name, *(Path(other).name for other in others))
