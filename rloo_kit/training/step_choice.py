"""The choice between the kit's training step and TRL's own step."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers import AutoConfig

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
    """The step that trains, the kit's or TRL's own, and the reason for TRL's."""

    by_trl: bool = False
    reason: str = ""

    def __str__(self) -> str:
        return f"TRL's own step trains: {self.reason}" if self.by_trl else "the kit's step trains"


def choose_step(
    args: LeaveOneOutConfig,
    *,
    images: bool = False,
    router_loss: float = 0.0,
    overridden: Collection[str] = (),
) -> StepChoice:
    """Return the step that trains.

    Args:
        args: Settings of the training.
        images: True if the prompts have images.
        router_loss: Coefficient of the load-balancing loss of a mixture of experts; 0 for none.
        overridden: Methods that a subclass of the trainer overrides.

    Raises:
        ConfigError: ``step: kit`` cannot run this training, or a setting has no effect on the step
            that trains.
    """
    names = sorted(TRL_METHODS & set(overridden))
    reasons = {
        f"{args.world_size} processes train": args.world_size > 1,
        "DeepSpeed or FSDP divides the model": bool(args.deepspeed or args.fsdp)
        or divided_by_launcher(),
        "the prompts have images": images,
        f"trainer.router_aux_loss_coef is {router_loss:g}": router_loss != 0,
        f"the trainer's class overrides {', '.join(names)}": bool(names),
    }
    _check_fsdp(args)
    reason = next((text for text, holds in reasons.items() if holds), "")
    if args.step == "kit" and reason:
        raise ConfigError(
            f"trainer.step is 'kit', and the kit's own step cannot train here, because {reason}: "
            f"set trainer.step to auto, which uses TRL's"
        )
    if args.step != "trl" and not reason:
        _check_defaults(args, OF_TRL_STEP, "only TRL's step obeys: set trainer.step to trl, or")
        return StepChoice()
    choice = StepChoice(True, reason or "trainer.step is 'trl'")
    _check_settings(args, choice)
    return choice


def check_tools(choice: StepChoice) -> None:
    """Check that the kit's step trains, since TRL's runs no tools.

    Raises:
        ConfigError: TRL's step trains.
    """
    if choice.by_trl:
        raise ConfigError(
            f"tools need the kit's own step, and TRL's trains because {choice.reason}: leave the "
            "tools out, or change that"
        )


def _check_fsdp(args: LeaveOneOutConfig) -> None:
    """Reject FSDP if accelerate would ignore it silently."""
    asked = args.fsdp or uses_fsdp()
    state = args.distributed_state
    if asked and state is not None and state.distributed_type in ("NO", "MULTI_CPU"):
        raise ConfigError(
            "FSDP divides a model among the GPUs of several processes, and here it would do "
            "nothing: leave it out, or divide by DeepSpeed (examples/accelerate/zero3.yaml)"
        )


def let_trl_sample(args: LeaveOneOutConfig, choice: StepChoice) -> None:
    """Set TRL's vLLM arguments as ``generation`` says; turn vLLM off in TRL if the kit samples."""
    if choice.by_trl and args.generation in ("vllm", "server"):
        args.use_vllm = True
        args.vllm_mode = "server" if args.generation == "server" else "colocate"
    elif not choice.by_trl:
        args.use_vllm = False  # the kit samples


def set_router_loss(args: LeaveOneOutConfig, model: Model) -> float:
    """Return the coefficient of the load-balancing loss of a mixture of experts.

    The coefficient is ``args.router_aux_loss_coef`` or, if that is unset, the model's own; 0 if
    neither exists. For a mixture of experts whose router does not train, an unset coefficient
    becomes 0 in ``args``, because the loss would only change the hidden states that the frozen
    router reads.

    Args:
        args: Settings of the training.
        model: The policy, or its path, in which case all its weights train.
    """
    whole = isinstance(model, str)
    remote = args.trust_remote_code
    config = AutoConfig.from_pretrained(model, trust_remote_code=remote) if whole else model.config
    config = config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return args.router_aux_loss_coef or 0.0
    parameters = [] if whole else model.named_parameters()
    trained = [set(name.split(".")) for name, one in parameters if one.requires_grad]
    trains_router = whole or any(names & {"gate", "router"} for names in trained)
    if args.router_aux_loss_coef is None and not trains_router:
        args.router_aux_loss_coef = 0.0
    given = args.router_aux_loss_coef
    # TRL turns the loss on in its training passes; in other passes and in sampling it would fail
    config.output_router_logits = False
    return getattr(config, "router_aux_loss_coef", 0.0) if given is None else given


def _check_settings(args: LeaveOneOutConfig, choice: StepChoice) -> None:
    """Reject settings that have no effect on TRL's step."""
    why = f"only the kit's step obeys, and TRL's trains because {choice.reason}:"
    _check_defaults(args, OF_KIT_STEP, why)
    if args.use_cpu and (args.use_vllm or args.generation in ("vllm", "server")):
        raise ConfigError(
            f"TRL's step trains because {choice.reason}, and on a CPU vLLM cannot take the weights "
            "that TRL's step sends: set trainer.generation to transformers"
        )
    if args.stop_on and args.world_size > 1:
        raise ConfigError(
            f"trainer.stop_on is for one process, and {args.world_size} train: leave it out"
        )


def _check_defaults(args: LeaveOneOutConfig, names: Collection[str], why: str) -> None:
    """Reject a value other than the default for settings that have no effect."""
    for name in names:
        if getattr(args, name) != LeaveOneOutConfig.__dataclass_fields__[name].default:
            value = format_value(getattr(args, name))
            raise ConfigError(f"trainer.{name} is {value}, which {why} leave it out")
