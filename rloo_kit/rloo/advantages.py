"""The leave-one-out maths, as pure functions on tensors.

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning
from Human Feedback in LLMs" (arXiv 2402.14740), section 3. P prompts, G generations per prompt.
"""

from collections.abc import Callable

import torch


def leave_one_out_baselines(rewards: torch.Tensor) -> torch.Tensor:
    """Return for each completion the mean reward of its scorable siblings.

    ``b_i = (sum_{j != i} r_j) / (n - 1)`` with n the scorable rewards of the group. The baseline
    does not depend on completion i, so subtracting it leaves the policy gradient unbiased.

    Args:
        rewards: ``(P, G)`` floats; NaN marks a completion that no reward function could score.

    Returns:
        ``(P, G)`` of the same dtype and device; NaN where the completion is unscorable or has no
        scorable sibling.
    """
    num_scorable = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (rewards.nansum(dim=1, keepdim=True) - rewards) / (num_scorable - 1)


def leave_one_out_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return ``A_i = r_i - b_i``, or 0 if there is nothing to learn.

    Equal to ``n / (n - 1) * (r_i - mean(r))`` over the n scorable rewards of the group.

    Args:
        rewards: ``(P, G)`` floats; NaN marks an unscorable completion.

    Returns:
        ``(P, G)`` of the same dtype and device, finite: exactly 0 for an unscorable completion, for
        a group with a single scorable one, and for a group whose rewards are all equal.

    >>> leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    advantages = (rewards - leave_one_out_baselines(rewards)).nan_to_num(nan=0.0)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    # Rounding of the sum must not turn equal rewards into a tiny signal.
    return advantages.masked_fill(lowest >= highest, 0.0)


# Advantages over a baseline, by its name in the setting `baseline`. A new baseline is a function of
# `(P, G)` rewards, and a row here
BASELINES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "leave_one_out": leave_one_out_advantages,
}


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``(B,)`` weighted sums of each row's rewards that are not NaN; NaN if all are NaN.

    Args:
        rewards: ``(B, F)`` floats of F functions.
        weights: ``(F,)``.
    """
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def normalised_sum(
    rewards: torch.Tensor, weights: torch.Tensor, num_generations: int
) -> torch.Tensor:
    """Return weighted sums of rewards after each reward is divided by its own spread.

    The spread of a reward is the root mean square of its leave-one-out advantages over the batch,
    so a reward of a hundred points counts as much as a reward of 0 or 1. GDPO (Liu et al. 2026,
    arXiv 2601.05242, section 3) divides by the spread of each group, which gives more weight to
    prompts that are nearly always or never solved. One number for the batch avoids that.

    Args:
        rewards: ``(B, F)`` floats of F functions, groups one after another; NaN is unscorable.
        weights: ``(F,)``.
        num_generations: G, completions of a group.

    Returns:
        ``(B,)`` of the same dtype and device; NaN if all rewards of the row are NaN. A reward that
        is constant in every group adds nothing.
    """
    grouped = rewards.T.reshape(-1, num_generations)  # (F * P, G)
    advantages = leave_one_out_advantages(grouped).view_as(rewards.T)  # (F, B)
    spread = advantages.square().mean(dim=1).sqrt()  # (F,)
    return weighted_sum(rewards, torch.where(spread > 0, weights.to(rewards) / spread, 0.0))
