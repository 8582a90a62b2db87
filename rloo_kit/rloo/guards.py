"""Guards of a training step against NaN/Inf in gradients or weights, and against out of memory."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rloo_kit.errors import DivergedError
from rloo_kit.machine.cleanup import is_out_of_memory

if TYPE_CHECKING:
    from torch import Tensor
    from torch.amp import GradScaler  # pyright: ignore[reportPrivateImportUsage]

REMEDY = (
    "lower trainer.learning_rate or trainer.max_grad_norm, compute in bf16 or float32 instead of "
    "fp16, or scale the reward down"
)
RESUME = "the last checkpoint is not affected, so resume from it with --resume"


# --- NaN and Inf ---------------------------------------------------------------------------------


@dataclass(eq=False)
class StepGuard:
    """Guard that skips optimizer steps with NaN/Inf gradients, and raises after too many in a row.

    Args:
        limit: The number of skipped steps in a row that raises an error.
        scaler: The loss scaler, which only fp16 training has; None in other precisions.
        skipped: The number of steps skipped so far.
        in_a_row: The number of skipped steps since the last good step. Steps that fp16's scaler
            skips while it searches for its scale are not counted.
    """

    limit: int
    scaler: "GradScaler | None" = None
    skipped: int = 0
    in_a_row: int = 0

    def check(self, loss: float, parameters: "Sequence[Tensor]", step: int) -> bool:
        """Return True if loss and gradients are finite; otherwise make the optimizer skip the step.

        To skip a step, its gradients are removed or, with a scaler, set to NaN.

        Args:
            loss: Loss of the step.
            parameters: The trained parameters, with the gradients of the step.
            step: The number of the step, for messages.

        Raises:
            DivergedError: Too many steps in a row were skipped, or the weights are NaN/Inf.
        """
        scaler = self.scaler
        gradients = [p.grad for p in parameters if p.grad is not None]
        if math.isfinite(loss) and math.isfinite(_norm(gradients)):
            self.in_a_row = 0
            return True
        check_finite(parameters, step - 1)
        self.skipped += 1
        # fp16's scaler skips steps while it searches for its scale; these do not count
        searching = scaler is not None and math.isfinite(loss) and scaler.get_scale() > 1
        found = f"loss {loss:.4g}, {_count(gradients)} of {len(gradients)} gradients not finite"
        for parameter in parameters:
            if scaler is None:  # without a gradient an optimizer leaves weight and moments alone
                parameter.grad = None
            elif parameter.grad is not None:  # a scaler skips the step if it finds NaN
                parameter.grad.fill_(math.nan)
        if searching:
            return False
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise DivergedError(
                f"{self.in_a_row} optimizer steps in a row were skipped because of NaN or Inf, "
                f"most recently step {step} ({found}): {REMEDY}; {RESUME}"
            )
        warnings.warn(
            f"step {step} is skipped because of NaN or Inf ({found}); training stops after "
            f"{self.limit} skipped steps in a row",
            RuntimeWarning,
            stacklevel=2,
        )
        return False


def check_finite(tensors: "Iterable[Tensor]", step: int | None = None) -> None:
    """Check that the trained weights are finite; on a GPU this waits for running kernels once.

    Args:
        tensors: The trained weights.
        step: The number of the last optimizer step, for the message; None leaves it out.

    Raises:
        DivergedError: A weight is NaN or Inf.
    """
    found = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    if math.isfinite(_norm(found)):
        return
    bad = _count(found)  # the norm may overflow although every value is finite
    if bad:
        after = "" if step is None else f" after step {step}"
        raise DivergedError(
            f"{bad} of {len(found)} trained weight tensors hold NaN or Inf{after}, so nothing is "
            f"saved: {REMEDY}; {RESUME}"
        )


def _norm(tensors: "Sequence[Tensor]") -> float:
    """Return the 2-norm of all tensors together; it is NaN or Inf if any value is."""
    from torch.nn.utils import get_total_norm

    return float(get_total_norm(tensors))


def _count(tensors: "Sequence[Tensor]") -> int:
    """Return how many of the tensors contain NaN or Inf."""
    return sum(not bool(tensor.isfinite().all()) for tensor in tensors)


# --- out of memory -------------------------------------------------------------------------------


def retry_smaller(attempt: Callable[[], None], halve: Callable[[Exception], None]) -> None:
    """Call ``attempt`` again each time it runs out of memory, until it succeeds.

    Args:
        attempt: The work; it must continue from where it failed when called again.
        halve: Called with the out-of-memory error before each retry. It should make ``attempt``
            do less work at a time, or raise if that is not possible.

    Raises:
        Exception: Any other error of ``attempt``, and any error of ``halve``.
    """
    import torch

    while True:
        try:
            return attempt()
        except Exception as exc:
            if not is_out_of_memory(exc):
                raise
            halve(exc)
        # not inside `except`, where the error still holds the tensors of its frames
        torch.cuda.empty_cache()
