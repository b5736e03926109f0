"""Policy-gradient mathematics: KL estimators, clipped losses, returns and advantages.

Shape legend: `*_T` one value per response token of one sample; a list holds one such tensor per sample; `*_BT` a batch
padded to the longest response. Log-probabilities are natural logarithms; rewards are one number per sample.

Invariants: pure functions of their tensors, no process group, no randomness. A fully masked sample never influences
another sample. A masked token contributes no KL to a return.

Left out: normalisation of rewards within a group (`slime.rollout.conversion`), reduction over tokens
(`slime.utils.loss_reducers`), context parallelism (`slime.utils.cp_utils`), weights for off-policy data
(`slime.utils.importance_sampling`), and whitening over ranks (`slime.utils.distributed_utils`).
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

KL_TYPES = ("k1", "k2", "k3", "low_var_kl")


def compute_approx_kl(
    log_probs: torch.Tensor,
    log_probs_base: torch.Tensor,
    kl_loss_type: str,
    importance_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Per-token estimate of KL(policy || base) from one sample per position (Schulman, "Approximating KL divergence").

    With lr = log_probs - log_probs_base: k1 = lr, k2 = lr^2 / 2, k3 = low_var_kl = exp(-lr) - 1 + lr. The estimate is
    multiplied by `importance_ratio` if given; `low_var_kl` is then clamped to [-10, 10]. Computed in float32.

    Raises ValueError for an unknown `kl_loss_type`.
    """
    log_ratio = log_probs.float() - log_probs_base.float()
    if kl_loss_type == "k1":
        kl = log_ratio
    elif kl_loss_type == "k2":
        kl = log_ratio.square() / 2
    elif kl_loss_type in ("k3", "low_var_kl"):
        kl = torch.expm1(-log_ratio) + log_ratio
    else:
        raise ValueError(f"unknown --kl-loss-type {kl_loss_type!r}; choose one of {', '.join(KL_TYPES)}")
    if importance_ratio is not None:
        kl = kl * importance_ratio
    return kl.clamp(-10.0, 10.0) if kl_loss_type == "low_var_kl" else kl


def compute_policy_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token (PPO; asymmetric bounds as in DAPO; dual clip of Ye et al. 2020 with `eps_clip_c`).

    `ppo_kl` = old - new log-prob, r = exp(-ppo_kl), L = max(-r A, -clip(r, 1 - eps_clip, 1 + eps_clip_high) A); with
    `eps_clip_c` = c > 1 (AssertionError otherwise) L = min(L, -c A) where A < 0.

    Returns `(loss, clipped)` of the input's shape; `clipped` is 1.0 where the clipped term is the larger one.
    """
    ratio = torch.exp(-ppo_kl)
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(plain, bounded)
    if eps_clip_c is not None:
        assert eps_clip_c > 1.0, f"--eps-clip-c must be above 1, got {eps_clip_c}"
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, (bounded > plain).float()


def compute_cispo_loss(
    ppo_kl: torch.Tensor,
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """REINFORCE with a clipped, detached importance weight (MiniMax-M1): -sg(clip(r)) A log_prob, r = exp(-ppo_kl).

    Returns `(loss, clipped)` per token; every token keeps a gradient, `clipped` only reports where the weight was cut.
    """
    ratio = torch.exp(-ppo_kl).detach()
    weight = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -weight * advantages * log_probs, (weight != ratio).float()


def _masked_mean(values_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    return (values_T * mask_T).sum() / mask_T.sum().clamp(min=1)


def compute_gspo_kl(
    full_log_probs: list[torch.Tensor],
    full_old_log_probs: list[torch.Tensor],
    local_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
) -> torch.Tensor:
    """Sequence-level ppo_kl (GSPO): masked mean of old - new over the sequence, the same value for each of its tokens.

    Returns all samples concatenated, [sum of local lengths]. Without context parallelism local equals full.
    """
    pieces = [
        _masked_mean(old - new, mask).expand_as(local)
        for new, old, local, mask in zip(full_log_probs, full_old_log_probs, local_log_probs, loss_masks, strict=True)
    ]
    return torch.cat(pieces)


def compute_opsm_mask(
    args: Namespace,
    full_log_probs: list[torch.Tensor],
    full_old_log_probs: list[torch.Tensor],
    advantages: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Off-policy sequence masking: 0 for tokens with A < 0 in sequences whose masked mean of old - new is above
    `args.opsm_delta`, else 1.

    Returns `(keep, dropped)`: `keep` concatenated over samples; `dropped` = sum over samples of the dropped share of the
    trained tokens (divide by the number of rollouts, like every reported value).
    """
    keep = []
    dropped = torch.zeros((), device=advantages[0].device if advantages else None)
    samples = zip(full_log_probs, full_old_log_probs, advantages, loss_masks, strict=True)
    for new, old, advantage, mask in samples:
        drop = ((advantage < 0) & (_masked_mean(old - new, mask) > args.opsm_delta)).float()
        keep.append(1.0 - drop)
        dropped = dropped + _masked_mean(drop, mask)
    return torch.cat(keep), dropped


def get_grpo_returns(rewards: torch.Tensor, kl: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every response token gets its sample's (already normalised) reward; `kl` gives lengths, dtypes and devices only."""
    return [torch.ones_like(kl_T) * reward for reward, kl_T in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards: torch.Tensor,
    kl: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> list[torch.Tensor]:
    """Discounted returns of REINFORCE++: token reward -kl_coef * kl * mask, plus the reward at the last trained token.

    The KL is masked before discounting, so that tool tokens between two trained spans add nothing to earlier returns.
    Raises ValueError when a response length disagrees with its tensors, and AssertionError for a fully masked sample, which
    has no trained token to carry the reward.
    """
    returns = []
    samples = zip(rewards, kl, loss_masks, response_lengths, total_lengths, strict=True)
    for i, (reward, kl_T, mask_T, length, _) in enumerate(samples):
        if kl_T.shape != (length,) or mask_T.shape != (length,):
            shapes = f"kl {tuple(kl_T.shape)}, mask {tuple(mask_T.shape)}"
            raise ValueError(f"sample {i}: {shapes} for a response of {length} tokens")
        token_rewards = -kl_coef * kl_T * mask_T
        trained = mask_T.nonzero()
        assert len(trained), f"sample {i} is fully masked: no token can carry its reward"
        token_rewards[trained[-1]] += reward
        returns.append(chunked_discounted_returns(token_rewards, gamma))
    return returns


def get_reinforce_plus_plus_baseline_advantages(
    rewards: torch.Tensor,
    kl: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    kl_coef: float,
) -> list[torch.Tensor]:
    """REINFORCE++ with baseline: (reward minus group mean, done by the caller) - kl_coef * kl, per token, undiscounted."""
    return [
        torch.ones_like(mask_T, dtype=kl_T.dtype) * reward - kl_coef * kl_T
        for reward, kl_T, mask_T in zip(rewards, kl, loss_masks, strict=True)
    ]


def chunked_discounted_returns(rewards: torch.Tensor, discount: float, chunk_size: int = 128) -> torch.Tensor:
    """G_t = r_t + discount * G_{t+1} over the last dimension, G after the end = 0.

    Equal to the sequential recursion; inside a chunk it is one product with M[s, t] = discount^(s - t) for s >= t, and
    only the first value of a chunk is carried to the one before it. Any leading dimensions; `discount` may be 0.
    """
    length = rewards.shape[-1]
    returns = torch.empty_like(rewards)
    steps = torch.arange(min(chunk_size, length), device=rewards.device)
    distance = steps[:, None] - steps[None, :]
    base = torch.tensor(discount, dtype=rewards.dtype, device=rewards.device)
    # 0^0 = 1 keeps the diagonal for discount 0; the clamp keeps negative exponents out of the unused triangle.
    matrix = torch.where(distance >= 0, base ** distance.clamp(min=0), 0.0)
    carry = rewards.new_zeros(rewards.shape[:-1])
    for end in range(length, 0, -chunk_size):
        start = max(end - chunk_size, 0)
        n = end - start
        tail = base ** (n - steps[:n])
        chunk = rewards[..., start:end] @ matrix[:n, :n] + carry[..., None] * tail
        returns[..., start:end] = chunk
        carry = chunk[..., 0]
    return returns


def get_ppo_token_rewards(rewards: torch.Tensor, kl: list[torch.Tensor], kl_coef: float) -> list[torch.Tensor]:
    """Token rewards of PPO: -kl_coef * kl at every token, plus the sample's reward at the last one. `kl[i]` is [R_i]."""
    token_rewards = [-kl_coef * kl_T for kl_T in kl]
    for reward, row_T in zip(rewards, token_rewards, strict=True):
        row_T[-1:] += reward
    return token_rewards


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped squared error per token (PPO's critic): max((clip(V, V_old -+ value_clip) - G)^2, (V - G)^2).

    Returns `(loss, clipped)` of the input's shape; `clipped` is 1.0 where the clipped term is the larger one.
    """
    # Not old + clip(new - old): its rounding would report values as clipped that are not.
    bounded = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    plain, limited = (values - returns).square(), (bounded - returns).square()
    return torch.maximum(plain, limited), (limited > plain).float()


def get_opd_reverse_kl(
    student_log_probs: list[torch.Tensor], teacher_log_probs: list[torch.Tensor], loss_masks: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Student - teacher log-prob of the student's own tokens, 0 at masked ones: one-sample estimate of KL(student || teacher).

    (On-policy distillation, Agarwal et al. 2024.) Raises ValueError naming the sample whose lengths differ.
    """
    rows = []
    samples = zip(student_log_probs, teacher_log_probs, loss_masks, strict=True)
    for i, (student_T, teacher_T, mask_T) in enumerate(samples):
        if student_T.shape != teacher_T.shape:
            raise ValueError(
                f"sample {i}: {len(teacher_T)} teacher_log_probs for a response of {len(student_T)} tokens"
            )
        rows.append(torch.where(mask_T != 0, student_T - teacher_T, 0.0))
    return rows


def _td_errors(rewards_BT: torch.Tensor, values_BT: torch.Tensor, gamma: float) -> torch.Tensor:
    next_values = torch.cat([values_BT[..., 1:], torch.zeros_like(values_BT[..., :1])], dim=-1)
    return rewards_BT + gamma * next_values - values_BT


def vanilla_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016), the sequential reference. Inputs [B, T].

    delta_t = r_t + gamma V_{t+1} - V_t with V after the end = 0; A_t = delta_t + gamma lambd A_{t+1}.
    Returns `(advantages, advantages + values)`.
    """
    deltas = _td_errors(rewards, values, gamma)
    advantages = torch.zeros_like(deltas)
    last = deltas.new_zeros(deltas.shape[:-1])
    for t in reversed(range(deltas.shape[-1])):
        last = deltas[..., t] + gamma * lambd * last
        advantages[..., t] = last
    return advantages, advantages + values


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same result as `vanilla_gae` with one matrix product per chunk of `chunk_size` tokens."""
    advantages = chunked_discounted_returns(_td_errors(rewards, values, gamma), gamma * lambd, chunk_size)
    return advantages, advantages + values


def get_advantages_and_returns_batch(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    values_list: list[torch.Tensor],
    rewards_list: list[torch.Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """GAE for samples of different response lengths; `values_list[i]` and `rewards_list[i]` are [response_lengths[i]].

    Padding with zeros is exact: behind a sample's end rewards and values are 0, and so is every advantage.
    Returns `(advantages, returns)`, one tensor per sample. Raises ValueError when the lists do not fit together.
    """
    lengths = list(response_lengths)
    found = {"values": [len(v) for v in values_list], "rewards": [len(r) for r in rewards_list]}
    for name, got in found.items():
        if got != lengths or len(total_lengths) != len(lengths):
            raise ValueError(f"{name} of lengths {got} for {len(total_lengths)} samples with responses of {lengths}")
    if not lengths:
        return [], []
    values_BT = torch.nn.utils.rnn.pad_sequence(values_list, batch_first=True)
    rewards_BT = torch.nn.utils.rnn.pad_sequence(rewards_list, batch_first=True)
    gae = chunked_gae if chunked else vanilla_gae
    advantages, returns = gae(rewards_BT, values_BT, gamma, lambd)
    cut = [(a[:n], r[:n]) for a, r, n in zip(advantages, returns, lengths, strict=True)]
    return [a for a, _ in cut], [r for _, r in cut]


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: torch.distributed.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits)[token] and, on request, the entropy of that softmax, float32 [N]; for losses that start from logits.

    `logits` [N, V], already divided by the temperature; `tokens` [N]. `log_prob_keep_mask` [N, V]: the softmax of the log-probs runs
    over the kept entries only (the token itself is always kept), that of the entropy over all. `chunk_size` rows at a time, <= 0 means
    all. The trainer itself uses `slime.utils.logprobs`, which never holds all logits.

    Raises ValueError for a `tp_group` of several ranks: vocabulary parallelism is a matter of the backend that has it.
    """
    if tp_group is not None and tp_group.size() > 1:
        raise ValueError(f"logits split over {tp_group.size()} ranks: vocabulary parallelism is not available here")
    log_probs, entropies = [], []
    size = chunk_size if chunk_size > 0 else max(len(logits), 1)
    for start in range(0, max(len(logits), 1), size):
        rows = slice(start, start + size)
        chunk_CV = logits[rows].float()
        kept_CV = chunk_CV
        if log_prob_keep_mask is not None:
            kept_CV = _mask_logits(chunk_CV, tokens[rows], log_prob_keep_mask[rows])
        log_probs.append(kept_CV.log_softmax(-1).gather(1, tokens[rows, None])[:, 0])
        if with_entropy:
            log_p_CV = chunk_CV.log_softmax(-1)
            entropies.append(-(log_p_CV.exp() * log_p_CV).sum(-1))
    if not with_entropy:
        return torch.cat(log_probs), None
    entropy_N = torch.cat(entropies)
    return torch.cat(log_probs), entropy_N if with_entropy_grad else entropy_N.detach()


def _mask_logits(logits_CV: torch.Tensor, tokens_C: torch.Tensor, keep_CV: torch.Tensor) -> torch.Tensor:
    kept_CV = keep_CV.bool().scatter(1, tokens_C[:, None], True)
    return logits_CV.masked_fill(~kept_CV, float("-inf"))
