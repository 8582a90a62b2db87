"""Finding and loading the models that a user names: runs, adapters and base models.

Several adapters of the same base model share one loaded base.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rloo_kit.checkpoints.store import find_checkpoint
from rloo_kit.config.engine_tables import SHARED_ENGINE_NAMES
from rloo_kit.config.run_file import ModelSection, RunConfig, read_run_file, without_hidden_settings
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.environment import setup
from rloo_kit.models.adapters import CONFIG, adapter_in, as_recorded, base_of, revision_of
from rloo_kit.models.loading import load_model
from rloo_kit.models.shape import ModelShape, read_shape
from rloo_kit.output_folder import read_json
from rloo_kit.sampling.engine import why_no_hot_swap
from rloo_kit.text.thoughts import give_marks
from rloo_kit.text.wording import first_line, format_value, resume_command


@dataclass(frozen=True)
class TrainedModel:
    """A base model, with a trained adapter or alone. Nothing is loaded yet."""

    name: str  # the name that the user gave, or ``base of`` and that name
    base: str  # a hub name, a folder, a .gguf file, or an embedded model
    # Settings to load and sample with: the run's settings, or the kit's defaults without a run.
    # `config.model.name` may be the hub name of the 4-bit model that Unsloth loaded, not the base
    config: RunConfig
    adapter: Path | None = None  # folder in PEFT's layout; None: the base alone
    run: Path | None = None  # folder of the run that trained the adapter

    @property
    def model(self) -> ModelSection:
        """Settings to load the base with."""
        return self.config.model

    @property
    def short_name(self) -> str:
        """Name of the run's folder, or of the adapter's folder if there is no run.

        It is ``base`` for a base model alone, and ``adapter`` if the name of the folder is "" or
        ``base``.
        """
        if self.adapter is None:
            return "base"
        name = (self.run or self.adapter).resolve().name
        return name if name not in ("", "base") else "adapter"

    @property
    def fp16(self) -> bool:
        """True if the run's settings request training in float16."""
        return bool(self.config.trainer.get("fp16"))

    @property
    def base_settings(self) -> tuple[ModelSection, str, bool]:
        """Settings to load the base with; models with equal settings can share one loaded base.

        They contain the text of the chat template instead of the path of its file.
        """
        section = self.config.model
        template = section.chat_template
        if template is not None:
            with contextlib.suppress(OSError, UnicodeError):  # loading reports it
                template = Path(template).expanduser().read_text(encoding="utf-8")
        on_unsloth = setup(section.backend).backend == "unsloth"
        unsloth = repr(sorted(self.config.unsloth.items())) if on_unsloth else ""
        return replace(section, chat_template=template), unsloth, self.fp16

    def shape(self, **changes: Any) -> ModelShape:
        """Return the shape of the base. ``changes`` has the same meaning as for ``load_base``.

        Raises:
            ModelError: The config of the model cannot be read.
        """
        model = _model_with(self, **changes)
        trusts = model.trust_remote_code
        return read_shape(model.name, revision=model.revision, trust_remote_code=trusts)

    def without_adapter(self) -> "TrainedModel":
        """Return the base model alone, as a ``TrainedModel`` without an adapter."""
        return replace(self, name=f"base of {self.name}", adapter=None)


def _model_with(trained: TrainedModel, **changes: Any) -> ModelSection:
    """Return a base's settings with ``changes`` applied.

    If ``changes`` gives a different ``name``, the revision becomes None.
    """
    if changes.get("name", trained.base) not in (trained.base, trained.model.name):
        changes["revision"] = None
    return replace(trained.model, **changes)


def find_trained(given: str | Path) -> TrainedModel:
    """Find the base model and the adapter that a path or a name stands for.

    Args:
        given: The folder of a run, of a checkpoint or of an adapter, or a model's name as in
            ``load_model``. In a run's folder, ``adapter/`` is used if the run has ended. Otherwise
            the newest valid checkpoint is used, or ``adapter/`` if there is none.

    Raises:
        ConfigError: The run has neither an adapter nor a checkpoint, or ``given`` is a reward
            model.
        ModelError: The adapter's configuration does not name a base model.
    """
    text = str(given)
    folder = Path(os.path.expanduser(given))
    if (read_json(folder / CONFIG) or {}).get("task_type") == "SEQ_CLS":
        raise ConfigError(
            f"{format_value(text)} is a reward model, which writes no text: name it among the "
            "rewards of a run, or give the folder of a run"
        )
    if os.path.isfile(folder / "run.yaml"):  # False for a name that cannot be a path
        return _of_run(text, folder, _adapter_of(folder))
    if not os.path.isfile(folder / CONFIG):
        return TrainedModel(text, text, RunConfig(model=ModelSection(name=text)))
    place = folder.resolve()
    parent = place.parent
    # A folder with another name may lie next to a run file that a user wrote
    is_its = re.fullmatch(r"adapter|checkpoint-\d+", place.name)
    if (parent / "run.yaml").is_file() and (is_its or (parent / "environment.json").is_file()):
        return _of_run(text, parent, folder)
    model = ModelSection(name=base_of(folder), revision=revision_of(folder))
    config = RunConfig(model=_with_template(model, folder))
    return TrainedModel(text, model.name, as_recorded(config, folder), folder)


def _adapter_of(run: Path) -> Path:
    adapter = run / "adapter"
    is_saved = (adapter / CONFIG).is_file()
    # Until a resumed run ends, it has no end.json, and its adapter is from before the resume
    if is_saved and (run / "end.json").is_file():
        return adapter
    if checkpoint := find_checkpoint(run):
        return checkpoint.folder
    if is_saved:
        return adapter
    raise ConfigError(
        f"the run in {format_value(str(run))} has no adapter yet and no checkpoint: train it "
        f"first with `{resume_command(run)}`"
    )


def _of_run(name: str, run: Path, adapter: Path) -> TrainedModel:
    config = without_hidden_settings(read_run_file(run / "run.yaml", recorded=True))
    model = config.model
    if started := adapter_in(model.name):  # the run trained an existing adapter further
        first = find_trained(started)
        model = model if model.chat_template else _with_template(model, started)
        model = replace(model, name=first.base, revision=first.model.revision)
    elif Path(model.name).is_absolute() and not Path(model.name).exists():  # the base was moved
        model = replace(model, name=base_of(adapter), revision=revision_of(adapter))
    if model.chat_template or model.name != config.model.name:
        model = _with_template(model, run / "adapter")  # a checkpoint has no template
        model = _with_template(model, adapter)
    config = as_recorded(replace(config, model=model), adapter)
    return TrainedModel(name, model.name, config, adapter, run)


def _with_template(model: ModelSection, adapter: Path) -> ModelSection:
    """Return the settings with the chat template that is saved with an adapter, if it has one.

    The saved template replaces the file that the run file names, because that file may have changed
    since the training.
    """
    file = adapter / "chat_template.jinja"
    return replace(model, chat_template=str(file)) if file.is_file() else model


def why_not_by_vllm(models: Sequence[TrainedModel]) -> str | None:
    """Return the reason why vLLM cannot sample for all of these models, or None if it can.

    Models on the same base share one engine. vLLM can sample for a base only if at least one of
    its models has an adapter.
    """
    from peft import PeftConfig

    for one in models:
        base = one.base_settings
        if not any(other.adapter and other.base_settings == base for other in models):
            return f"{one.name} has no adapter, but vLLM needs at least one adapter on each base"
        if one.adapter is None:
            continue
        with contextlib.suppress(Exception):  # an unreadable config is reported when it is loaded
            config = PeftConfig.from_pretrained(str(one.adapter))
            if why_not := why_no_hot_swap(SimpleNamespace(peft_config={"default": config})):
                return why_not
    return None


# --- loading -------------------------------------------------------------------------------------


@dataclass(eq=False)
class LoadedBase:
    """A base model in memory, with adapters of which at most one is active at a time."""

    model: Any
    tokenizer: Any
    _names: dict[Path, str] = field(default_factory=dict, init=False)  # folder -> name in PEFT

    @contextlib.contextmanager
    def using(self, trained: TrainedModel) -> Iterator[Any]:
        """Yield the model with the adapter of ``trained`` active during a ``with`` block.

        If ``trained`` has no adapter, the base is yielded with all adapters turned off.

        Raises:
            ModelError: The adapter cannot be loaded, or does not fit the base.
        """
        from trl.trainer.utils import use_adapter

        name = self.load(trained)
        with use_adapter(self.model, name) if self._names else contextlib.nullcontext():
            yield self.model

    def load(self, trained: TrainedModel) -> str | None:
        """Load the adapter of ``trained`` unless it is already loaded; return its name in PEFT.

        The name is None if ``trained`` has no adapter.

        Raises:
            ModelError: The adapter cannot be loaded, or does not fit the base.
        """
        from peft import PeftModel

        if trained.adapter is None:
            return None
        adapter = trained.adapter.resolve()
        if adapter in self._names:
            return self._names[adapter]
        try:
            with warnings.catch_warnings():
                # layers without weights in the file would stay untrained
                warnings.filterwarnings("error", message="Found missing adapter keys")
                if self._names:
                    name = f"adapter-{len(self._names)}"
                    found = self.model.load_adapter(str(adapter), adapter_name=name)
                    if found.missing_keys:  # PEFT warns of them only for the first adapter
                        self.model.delete_adapter(name)
                        raise ValueError(f"Found missing adapter keys: {found.missing_keys}")
                else:
                    name = "default"  # PEFT's name for the first adapter
                    self.model = PeftModel.from_pretrained(self.model, str(adapter))
        except Exception as exc:  # torch, PEFT and safetensors raise different errors
            raise ModelError(
                f"the adapter in {format_value(str(adapter))} cannot be put on its base "
                f"({first_line(exc)}): check that it was trained on this base model"
            ) from exc
        self._names[adapter] = name
        return name


def load_base(trained: TrainedModel, **changes: Any) -> LoadedBase:
    """Load the base of a model with the settings of its run in ``model:`` and ``unsloth:``.

    ``changes`` replaces fields of the run file's section ``model:``. If any are given, the run's
    precision and the tokenizer named under ``unsloth:`` are not used. If ``changes`` gives a
    different ``name``, Unsloth may load its own copy of that model.

    Raises:
        ModelError: The base cannot be loaded (see ``load_model``).
    """
    environment = setup(trained.model.backend)
    given = trained.config.unsloth if environment.backend == "unsloth" else {}
    of_run = ("load_in_", "tokenizer_name") if changes else ()
    if changes.get("name", trained.model.name) != trained.model.name:
        of_run += ("use_exact_model_name",)
    others = {
        name: given[name]
        for name in given.keys() - SHARED_ENGINE_NAMES
        if not name.startswith(of_run)
    }
    if trained.fp16 and environment.hardware.on_gpu and not changes:
        others["precision"] = "fp16"  # not on a CPU, where it is slow
    model, tokenizer = load_model(**vars(_model_with(trained, **changes)), **others)
    # Unsloth cuts prompts longer than the run's max_seq_length on a GPU
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    for module in model.modules():
        if limit := getattr(module, "max_seq_length", None):
            module.max_seq_length = max(limit, longest)
    give_marks(tokenizer, **vars(trained.config.thinking))
    return LoadedBase(model, tokenizer)
