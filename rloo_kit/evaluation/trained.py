"""Models as commands accept them: runs, adapters or bases; one loaded base for several of them."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rloo_kit.checkpoints.store import find_checkpoint
from rloo_kit.config.run_file import ModelSection, RunConfig, read_run_file, without_hidden_settings
from rloo_kit.errors import ConfigError, ModelError
from rloo_kit.machine.cleanup import release
from rloo_kit.models.adapters import CONFIG, adapter_in, base_of, is_path
from rloo_kit.models.loading import load_model
from rloo_kit.output_folder import read_json
from rloo_kit.sampling.engine import why_no_hot_swap
from rloo_kit.text.thoughts import give_marks
from rloo_kit.text.wording import first_line, format_value
from rloo_kit.types import Model, Tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A base and, if something was trained, the adapter on it; nothing is loaded yet."""

    name: str  # the name that the user gave, or ``base of`` it
    base: str  # a hub name, a folder, a .gguf file, or an embedded model
    adapter: Path | None = None  # folder in PEFT's layout; None: the base alone
    run: Path | None = None  # folder of the run that trained it
    config: RunConfig | None = None  # of that run
    loaded: str | None = None  # hub name of the 4-bit model that Unsloth loaded instead of the base

    @property
    def model(self) -> ModelSection:
        """Settings to load the base: those of the run, or else the kit's defaults."""
        settings = self.config.model if self.config is not None else ModelSection()
        return replace(settings, name=self.loaded or self.base)

    @property
    def short_name(self) -> str:
        """Name of the run's folder, or else of the adapter's; ``base`` for a base."""
        folder = self.run or self.adapter
        if self.adapter is None or folder is None:
            return "base"
        name = folder.resolve().name
        return name if name not in ("", "base") else "adapter"

    def without_adapter(self) -> "TrainedModel":
        """Return the base alone."""
        if self.adapter is None:
            return self
        return replace(self, name=f"base of {self.name}", adapter=None)


def find_trained(given: str | Path) -> TrainedModel:
    """Return the model that a path or name means.

    Args:
        given: The folder of a run (its ``adapter/``, or else its newest complete checkpoint), a
            checkpoint of one, the folder of an adapter, or a model as for ``load_model``.

    Raises:
        ConfigError: The run has neither adapter nor checkpoint.
        ModelError: The adapter does not name its base.
    """
    text = str(given)
    folder = Path(given)
    if os.path.isfile(folder / "run.yaml"):  # False for a name that cannot be a path
        return _of_run(text, folder, _adapter_of(folder))
    if not os.path.isfile(folder / CONFIG):
        return TrainedModel(text, text)
    parent = folder.resolve().parent
    if (parent / "run.yaml").is_file():
        return _of_run(text, parent, folder)
    return TrainedModel(text, base_of(folder), folder)


def _adapter_of(run: Path) -> Path:
    adapter = run / "adapter"
    is_saved = (adapter / CONFIG).is_file()
    # a resumed run that has not ended has no end.json, and an older adapter
    if is_saved and (run / "end.json").is_file():
        return adapter
    if checkpoint := find_checkpoint(run):
        return checkpoint.folder
    if is_saved:
        return adapter
    raise ConfigError(
        f"the run in {format_value(str(run))} has no adapter yet, and no checkpoint: train it "
        f"first, with rloo-kit train {run} --resume"
    )


def _of_run(name: str, run: Path, adapter: Path) -> TrainedModel:
    config = without_hidden_settings(read_run_file(run / "run.yaml"))
    base = config.model.name
    started = adapter_in(config.model.name)
    loaded = None
    if started is not None:  # it trained another run's adapter further
        base = find_trained(started).base
    elif Path(base).is_absolute() and not Path(base).exists():  # the base was moved
        base = base_of(adapter)
    if _is_on_hub(base):  # PEFT notes the model that was loaded
        loaded = str((read_json(adapter / CONFIG) or {}).get("base_model_name_or_path"))
        loaded = loaded if _is_on_hub(loaded) else None
    return TrainedModel(name, base, adapter, run, config, loaded)


def _is_on_hub(name: str) -> bool:
    return "/" in name and not is_path(name) and not Path(name).exists()


def why_not_by_vllm(models: Sequence[TrainedModel]) -> str | None:
    """Return why vLLM cannot sample for all of these models, or None.

    Models on the same base share an engine, which needs a base with at least one adapter.
    """
    from peft import PeftConfig

    for one in models:
        if not any(other.adapter and other.model == one.model for other in models):
            return f"{one.name} has no adapter, but vLLM needs a base with one"
        if one.adapter is None:
            continue
        with contextlib.suppress(Exception):  # loading it reports an unreadable config
            config = PeftConfig.from_pretrained(str(one.adapter))
            if why_not := why_no_hot_swap(SimpleNamespace(peft_config={"default": config})):
                return why_not
    return None


# --- loading -------------------------------------------------------------------------------------


class LoadedBase:
    """A base in memory with several adapters, one of which is active at a time."""

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self._names: dict[Path, str] = {}

    @contextlib.contextmanager
    def using(self, trained: TrainedModel) -> Iterator[Any]:
        """Yield the model with the adapter of ``trained`` active, or without any.

        Raises:
            ModelError: The adapter cannot be loaded, or does not fit the base.
        """
        from trl.trainer.utils import use_adapter

        name = self.load(trained)
        with use_adapter(self.model, name) if self._names else contextlib.nullcontext():
            yield self.model

    def load(self, trained: TrainedModel) -> str | None:
        """Load the adapter of ``trained``, once, and return its name in the model; None for a base.

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
            if self._names:
                name = f"adapter-{len(self._names)}"
                self.model.load_adapter(str(adapter), adapter_name=name)
            else:
                name = "default"  # PEFT's name, whose adapter an engine gets
                self.model = PeftModel.from_pretrained(self.model, str(adapter))
        except Exception as exc:  # torch, PEFT and safetensors raise different errors
            raise ModelError(
                f"the adapter in {format_value(str(adapter))} cannot be put on its base "
                f"({first_line(exc)}): check that it was trained on this model"
            ) from exc
        self._names[adapter] = name
        return name


def load_base(trained: TrainedModel, **changes: Any) -> LoadedBase:
    """Load the base of a model as its run did, with ``changes`` to the run file's ``model:``.

    Raises:
        ModelError: The base cannot be loaded (``load_model``).
    """
    if "name" in changes:  # another model, which has not this revision
        changes["revision"] = None
    model, tokenizer = load_model(**vars(replace(trained.model, **changes)))
    # Unsloth cuts prompts longer than the run's max_seq_length on a GPU
    longest = getattr(model.config, "max_position_embeddings", None) or 0
    for module in model.modules():
        if limit := getattr(module, "max_seq_length", None):
            module.max_seq_length = max(limit, longest)
    give_marks(tokenizer, **vars((trained.config or RunConfig()).thinking))
    return LoadedBase(model, tokenizer)


def by_base(models: Sequence[TrainedModel]) -> Iterator[tuple[LoadedBase, list[TrainedModel]]]:
    """Load each base once and yield it with the models on it; release it before the next one."""
    waiting = list(models)
    while waiting:
        same = [one for one in waiting if one.model == waiting[0].model]
        waiting = [one for one in waiting if one not in same]
        base = load_base(same[0])
        yield base, same
        release(base.model)
