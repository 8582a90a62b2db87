"""Notes of the kit on a model that it loaded."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModelNotes:
    """Facts about a loaded model that the kit needs later."""

    backend: str | None = None  # "unsloth" or "transformers"
    max_seq_length: int | None = None  # longest prompt plus completion, tokens
    gradient_checkpointing: bool | str | None = None  # as the user set it; None: not set
    hub: tuple[str, str] | None = None  # name and revision on the hub, if one was requested
    adapter: str | None = None  # the folder that the model's adapter was loaded from
    vllm: dict[str, Any] = field(default_factory=dict)  # further arguments of a vLLM of its own
    trust_remote_code: bool = False
    shared_engine: Any = None  # `EngineSettings` of the engine that shares the weights
    why_not_shared: str | None = None


def notes_of(model: Any) -> ModelNotes:
    """Return the notes on a model; a PEFT model has those of its base."""
    notes = getattr(model, "rloo_kit_notes", None)
    if notes is None:
        notes = model.rloo_kit_notes = ModelNotes()
    return notes
