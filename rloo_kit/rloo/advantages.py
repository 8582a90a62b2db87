"""The leave-one-out maths, as pure functions on tensors.

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning
from Human Feedback in LLMs" (arXiv 2402.14740), section 3. P prompts, G generations per prompt.
"""

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
    """Return ``A_i = r_i - b_i``, with 0 where there is nothing to learn from.

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
    # Rounding of the sum must not turn "all alike" into a tiny signal.
    return advantages.masked_fill(lowest >= highest, 0.0)
