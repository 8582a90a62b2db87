"""Numbers that are none: a step that would spoil the weights is skipped, spoiled ones are found."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rloo_kit.errors import DivergedError

REMEDY = (
    "lower trainer.learning_rate or trainer.max_grad_norm, compute in bf16 or float32 instead of "
    "fp16, or scale the reward down"
)
GO_ON = "the last checkpoint is whole: train with --resume to go on from it"


class StepGuard:
    """Keeps an optimizer from stepping with gradients that are no finite numbers.

    The gradients of such a step are dropped; an optimizer leaves a parameter without gradient, its
    moments and its decay alone. Under fp16 the loss scaler skips by itself: it searches for
    its scale that way, so that only what fails at a scale of 1 or with a loss of its own that is
    no number counts towards the limit.

    Args:
        limit: Steps in a row that may not be skipped: the last of them raises.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.skipped = 0
        """Steps skipped so far."""
        self.in_a_row = 0
        """Those of them that were skipped since the last good step and count towards the limit."""

    def check(self, loss: float, parameters: Sequence[Any], step: int, scaler: Any = None) -> bool:
        """Return whether the optimizer may step; drop the gradients where not.

        Costs one norm over the gradients, and one synchronisation of a GPU.

        Args:
            loss: Of the step.
            parameters: Those that train, with their gradients.
            step: The number of the step, for the message.
            scaler: fp16's loss scaler; None where there is none.

        Raises:
            DivergedError: It is the last step of too many in a row, or the weights are at fault.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if math.isfinite(loss) and math.isfinite(_norm(gradients)):
            self.in_a_row = 0
            return True
        check_finite(parameters, step - 1)
        self.skipped += 1
        searching = scaler is not None and math.isfinite(loss) and scaler.get_scale() > 1
        said = f"the loss is {loss:.4g}, {_count(gradients)} of {len(gradients)} gradients"
        _drop(parameters, scaler)
        if searching:
            return False
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise DivergedError(
                f"step {step} is number {self.in_a_row} in a row whose loss or gradients are no "
                f"finite numbers ({said}), and no weight moved in these: {REMEDY}; {GO_ON}"
            )
        warnings.warn(
            f"step {step} is skipped, no weight moves: its loss or gradients are no finite numbers "
            f"({said}); {self.limit} such steps in a row end the training",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def check_finite(tensors: Iterable[Any], step: int | None = None) -> None:
    """Raise where a weight, or anything else that is about to be kept, is no finite number.

    Costs one norm, and one synchronisation of a GPU.

    Args:
        tensors: Trained parameters, or the tensors of a file; whole numbers pass.
        step: Optimizer steps made; None where that is not known.

    Raises:
        DivergedError: Some hold NaN or infinity.
    """
    found = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    if math.isfinite(_norm(found)):
        return
    bad = _count(found)  # a norm may overflow where no single number does
    if bad:
        after = "" if step is None else f" after step {step}"
        raise DivergedError(
            f"{bad} of {len(found)} trained weights hold NaN or infinity{after}, so nothing of "
            f"them is kept: {REMEDY}; {GO_ON}"
        )


@contextlib.contextmanager
def finite_logits() -> Iterator[None]:
    """Say what is wrong where a model samples from probabilities that are no numbers.

    Raises:
        DivergedError: The model's logits hold NaN or infinity.
    """
    try:
        yield
    except RuntimeError as exc:
        if "probability tensor contains" not in str(exc):
            raise
        raise DivergedError(
            "the model's logits hold NaN or infinity, so that nothing can be sampled: compute in "
            f"bf16 or float32 instead of fp16, or lower trainer.learning_rate; {GO_ON}"
        ) from exc


def _norm(tensors: Sequence[Any]) -> float:
    """Return the 2-norm of all of them; NaN and infinity come through."""
    from torch.nn.utils import get_total_norm

    return float(get_total_norm(tensors)) if tensors else 0.0


def _count(tensors: Sequence[Any]) -> int:
    return sum(not bool(tensor.isfinite().all()) for tensor in tensors)


def _drop(parameters: Sequence[Any], scaler: Any) -> None:
    """Leave the optimizer nothing to step with; a scaler skips what is no number, and wants it."""
    for parameter in parameters:
        if scaler is None:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.fill_(math.nan)
