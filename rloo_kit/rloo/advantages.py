"""Leave-one-out baselines and advantages, and sums of rewards, as pure functions on tensors.

Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE-Style Optimization for Learning
from Human Feedback in LLMs" (arXiv 2402.14740), section 3.

Shapes: P prompts, G generations per prompt, B = P*G completions, F reward functions.
"""

import torch
from torch import Tensor


def leave_one_out_baselines(rewards: Tensor) -> Tensor:
    """Return, for each completion, the mean reward of the other scorable completions of its group.

    ``b_i = (sum_{j != i} r_j) / (n - 1)``, where n is the number of scorable completions of the
    group. The baseline does not depend on completion i, so subtracting it leaves the policy
    gradient unbiased.

    Args:
        rewards: ``(P, G)`` floats for P groups of G completions; NaN marks a completion that no
            reward function could score.

    Returns:
        ``(P, G)`` baselines of the same dtype and device; NaN if the completion is unscorable or
        no other completion of its group is scorable.
    """
    num_scorable = (~rewards.isnan()).sum(dim=1, keepdim=True)
    return (rewards.nansum(dim=1, keepdim=True) - rewards) / (num_scorable - 1)


def leave_one_out_advantages(rewards: Tensor) -> Tensor:
    """Return the advantages ``A_i = r_i - b_i``, where b is the leave-one-out baseline.

    They are equal to ``n / (n - 1) * (r_i - mean(r))`` over the n scorable rewards of the group.

    Args:
        rewards: ``(P, G)`` floats for P groups of G completions; NaN marks an unscorable
            completion.

    Returns:
        ``(P, G)`` finite advantages of the same dtype and device. They are exactly 0 for an
        unscorable completion, in a group with a single scorable completion, and in a group whose
        rewards are all equal.

    >>> leave_one_out_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    advantages = (rewards - leave_one_out_baselines(rewards)).nan_to_num(nan=0.0)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(dim=1, keepdim=True)
    highest = rewards.nan_to_num(nan=-torch.inf).amax(dim=1, keepdim=True)
    # Rounding of the sum must not turn equal rewards into a tiny signal.
    return advantages.masked_fill(lowest >= highest, 0.0)


# Value of the setting `baseline` -> function that turns `(P, G)` rewards into `(P, G)` advantages.
# To add a baseline, write such a function and add it here
BASELINES = {"leave_one_out": leave_one_out_advantages}


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each row's rewards.

    NaN rewards are left out of the sum. The sum is NaN if all rewards of the row are NaN.

    Args:
        rewards: ``(B, F)`` floats: B rows, with the rewards of F reward functions.
        weights: ``(F,)`` weights of the functions.
    """
    return (rewards * weights).nansum(dim=1).masked_fill(rewards.isnan().all(dim=1), torch.nan)


def normalised_sum(rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Return the weighted sum of each row's rewards after dividing every reward by its spread.

    The spread of a reward function is the root mean square of its leave-one-out advantages over the
    batch. After the division a reward between 0 and 100 counts as much as a reward between 0 and 1.
    GDPO (Liu et al. 2026, arXiv 2601.05242, section 3) divides by the spread of each group instead,
    which gives more weight to prompts that are nearly always or never solved. Using one spread for
    the whole batch avoids that.

    Args:
        rewards: ``(B, F)`` floats: B rows, with the rewards of F reward functions. The rows of a
            group are adjacent; NaN marks a row that a function could not score.
        weights: ``(F,)`` weights of the functions.
        num_generations: G, the number of completions of a group.

    Returns:
        ``(B,)`` sums of the same dtype and device; NaN if all rewards of the row are NaN. A reward
        that is constant within every group contributes 0.
    """
    grouped = rewards.T.reshape(-1, num_generations)  # (F * P, G)
    advantages = leave_one_out_advantages(grouped).view_as(rewards.T)  # (F, B)
    spread = advantages.square().mean(dim=1).sqrt()  # (F,)
    return weighted_sum(rewards, torch.where(spread > 0, weights.to(rewards) / spread, 0.0))
