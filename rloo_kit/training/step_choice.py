"""The choice between the kit's own training step and TRL's training step."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from rloo_kit.config.settings import OF_KIT_STEP, OF_TRL_STEP
from rloo_kit.errors import ConfigError
from rloo_kit.machine.processes import divided_by_launcher, uses_fsdp
from rloo_kit.text.wording import format_value
from rloo_kit.training.arguments import LeaveOneOutConfig
from rloo_kit.types import Model

# Methods of TRL that the kit's step never calls; a subclass that overrides one needs TRL's step
TRL_METHODS = {
    "_calculate_rewards", "_compute_loss", "_generate", "_generate_and_score_completions",
    "_generate_single_turn", "_get_per_token_logps_and_entropies", "_prepare_inputs",
    "compute_loss",
}  # fmt: skip


@dataclass(frozen=True)
class StepChoice:
    """The choice of a training step: the kit's step, or TRL's step with a reason."""

    by_trl: bool = False  # True if TRL's step is used
    reason: str = ""  # why TRL's step is used; empty if the kit's step is used

    def __str__(self) -> str:
        return f"TRL's own step trains: {self.reason}" if self.by_trl else "the kit's step trains"


def choose_step(
    args: LeaveOneOutConfig,
    *,
    images: bool = False,
    router_loss: float = 0.0,
    overridden: Collection[str] = (),
) -> StepChoice:
    """Choose the kit's training step, or TRL's if the kit's cannot run this training.

    The setting ``step`` can require one of the two.

    Args:
        args: Settings of the training.
        images: True if the prompts have images.
        router_loss: Coefficient of the load-balancing loss of a mixture of experts; 0 for none.
        overridden: Names in ``TRL_METHODS`` of the methods that the trainer's class overrides.

    Raises:
        ConfigError: ``step`` is ``kit`` but the kit's step cannot run this training, or a setting
            has no effect on the chosen step or does not work with it. Or FSDP is requested, but the
            training has only one process or runs on CPUs.
    """
    reasons = {
        f"{args.world_size} processes train": args.world_size > 1,
        "DeepSpeed or FSDP divides the model": bool(args.deepspeed or args.fsdp)
        or divided_by_launcher(),
        "the prompts have images": images,
        f"trainer.router_aux_loss_coef is {router_loss:g}": router_loss != 0,
        f"the trainer's class overrides {', '.join(sorted(overridden))}": bool(overridden),
    }
    state = args.distributed_state
    alone = state is not None and state.distributed_type in ("NO", "MULTI_CPU")
    if alone and (args.fsdp or uses_fsdp()):  # accelerate would ignore it without a warning
        raise ConfigError(
            "FSDP divides a model among the GPUs of several processes, but this run has only one "
            "process or no GPU: turn FSDP off, or use DeepSpeed instead "
            "(examples/accelerate/zero3.yaml)"
        )
    reason = next((text for text, holds in reasons.items() if holds), "")
    if args.step == "kit" and reason:
        raise ConfigError(
            f"trainer.step is 'kit', but the kit's own step cannot run this training because "
            f"{reason}: set trainer.step to auto, which uses TRL's step"
        )
    if args.step != "trl" and not reason:
        check_defaults(args, OF_TRL_STEP, "only TRL's step obeys: set trainer.step to trl, or")
        return StepChoice()
    reason = reason or "trainer.step is 'trl'"
    because = f"TRL's step is used because {reason}"
    check_defaults(args, OF_KIT_STEP, f"only the kit's step obeys, and {because}:")
    if args.use_cpu and (args.use_vllm or args.generation in ("vllm", "server")):
        raise ConfigError(
            f"{because}, but on a CPU vLLM cannot load the "
            "weights that TRL's step sends: set trainer.generation to transformers"
        )
    if args.stop_on and args.world_size > 1:
        raise ConfigError(
            f"trainer.stop_on works only with one process, but {args.world_size} processes train: "
            "leave it out"
        )
    return StepChoice(True, reason)


def check_tools(choice: StepChoice) -> None:
    """Check that the kit's step was chosen, because TRL's step cannot run tools.

    Raises:
        ConfigError: TRL's step was chosen.
    """
    if choice.by_trl:
        raise ConfigError(
            f"tools need the kit's own step, but TRL's step is used because {choice.reason}: "
            "remove the tools, or change the run so that it uses the kit's step"
        )


def let_trl_sample(args: LeaveOneOutConfig, choice: StepChoice) -> None:
    """Turn vLLM in TRL on or off, in ``args``.

    If TRL's step was chosen, it uses vLLM if ``generation`` is ``vllm`` or ``server``; for other
    values, TRL's own settings stay. If the kit's step was chosen, vLLM is off in TRL.
    """
    if not choice.by_trl:
        args.use_vllm = False
    elif args.generation in ("vllm", "server"):
        args.use_vllm = True
        args.vllm_mode = "server" if args.generation == "server" else "colocate"


def set_router_loss(args: LeaveOneOutConfig, model: Model, config: Any) -> float:
    """Set up the load-balancing loss of a mixture of experts, and return its coefficient.

    The coefficient is ``args.router_aux_loss_coef`` if that is set. If it is unset and the router
    is trained, the coefficient of the model's config is used, or 0 if the config has none. If it is
    unset and the router is frozen, it is set to 0 in ``args``, because the loss could only change
    the hidden states that the router reads.

    Args:
        args: Settings of the training, changed in place.
        model: The policy. A name or path counts as a model whose router is trained.
        config: The config of the policy, in which ``output_router_logits`` is turned off.
    """
    config = config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return args.router_aux_loss_coef or 0.0
    trains_router = isinstance(model, str) or any(
        parameter.requires_grad and {"gate", "router"}.intersection(name.split("."))
        for name, parameter in model.named_parameters()
    )
    if args.router_aux_loss_coef is None and not trains_router:
        args.router_aux_loss_coef = 0.0
    given = args.router_aux_loss_coef
    # TRL turns the loss on for its training passes; it would fail in other passes and in sampling
    config.output_router_logits = False
    return getattr(config, "router_aux_loss_coef", 0.0) if given is None else given


def check_defaults(
    args: LeaveOneOutConfig,
    names: Collection[str],
    why: str,
    config: type[LeaveOneOutConfig] = LeaveOneOutConfig,
) -> None:
    """Check that settings that would have no effect were not changed from their defaults.

    Args:
        args: Settings of the training.
        names: Names of the settings that would have no effect.
        why: The part of the error message between "which" and "leave it out".
        config: The class that defines the defaults.

    Raises:
        ConfigError: One of the settings does not have its default value.
    """
    for name in names:
        if getattr(args, name) != config.__dataclass_fields__[name].default:
            value = format_value(getattr(args, name))
            raise ConfigError(f"trainer.{name} is {value}, which {why} leave it out")
