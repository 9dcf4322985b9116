"""What every objective must give on small batches, edge cases included, for test_golden_objectives.py.

The references are plain Python in float64, one loop per formula of the papers, and use nothing of the library.
Gradients by log-probs are central differences of the written loss (a stop-gradient is a second argument that stays
fixed).
"""

import math
import random
from statistics import fmean as mean
from statistics import stdev as deviation

STEP = 1e-5  # of the central differences, whose error is then near 1e-9

# Settings that are exercised; keys are field names of the algorithm, and what is left out has its default.
SETTINGS = {
    "grpo": {"name": "grpo", "kl_beta": 0.1, "std_floor": 0.01},
    "grpo_no_kl": {"name": "grpo", "kl_beta": 0.0},
    "grpo_k1": {"name": "grpo", "kl_beta": 0.1, "kl_estimator": "k1"},
    "grpo_k2_clip_higher": {"name": "grpo", "kl_beta": 0.1, "kl_estimator": "k2", "clip_epsilon_high": 0.4},
    "grpo_self_consistency": {"name": "grpo_self_consistency"},
    "dr_grpo": {"name": "dr_grpo", "loss_denominator": 16.0},
    "dr_grpo_kl": {"name": "dr_grpo", "kl_beta": 0.1},
    "dapo": {"name": "dapo"},
    "gspo": {"name": "gspo"},
    "gspo_wide": {"name": "gspo", "clip_epsilon": 0.3, "clip_epsilon_high": 0.4, "kl_beta": 0.05},
    "cispo": {"name": "cispo", "clip_epsilon_high": 0.2},
    "rloo": {"name": "rloo", "kl_beta": 0.05},
    "rloo_clipped": {"name": "rloo", "kl_beta": 0.0, "clip_epsilon": 0.2},
    "ppo": {"name": "ppo", "kl_beta": 0.05},
    "ppo_gae": {"name": "ppo", "kl_beta": 0.05, "gamma": 0.9, "gae_lambda": 0.8,
                "whiten_advantages": False, "entropy_bonus": 0.01},
    "ppo_decoupled": {"name": "ppo", "kl_beta": 0.05, "gamma": 0.9, "gae_lambda": 0.6, "gae_lambda_critic": 1.0},
    "ppo_length_adaptive": {"name": "ppo", "kl_beta": 0.05, "gae_lambda": 0.7, "length_adaptive_alpha": 0.4,
                            "whiten_advantages": False},
    "reinforce_plus_plus": {"name": "reinforce_plus_plus", "kl_beta": 0.05},
    "online_dpo": {"name": "online_dpo", "kl_beta": 0.5},
    "grpo_batch_std": {"name": "grpo", "kl_beta": 0.0, "std_over": "batch", "std_floor": 0.01},
    "grpo_dual_clip": {"name": "grpo", "kl_beta": 0.0, "ratio_bound": 1.5},
    "grpo_weighted_kl": {"name": "grpo", "kl_beta": 0.1, "kl_importance_weighted": True},
    "gspo_dual_clip": {"name": "gspo", "clip_epsilon": 0.1, "clip_epsilon_high": 0.1, "ratio_bound": 1.2},
    "ppo_dual_clip": {"name": "ppo", "kl_beta": 0.05, "clip_epsilon_high": 0.3, "ratio_bound": 1.4},
    "reinforce_plus_plus_discounted": {"name": "reinforce_plus_plus", "kl_beta": 0.05, "gamma": 0.9},
    "reinforce_plus_plus_baseline": {"name": "reinforce_plus_plus", "kl_beta": 0.05, "baseline": "group"},
    "maxrl": {"name": "maxrl", "loss_denominator": 16.0},
    "opo": {"name": "opo", "loss_denominator": 16.0},
    "lite_ppo": {"name": "lite_ppo"},
    "gmpo": {"name": "gmpo"},
    "gmpo_narrow": {"name": "gmpo", "clip_log_ratio": 0.1, "kl_beta": 0.05},
    "sapo": {"name": "sapo"},
    "sapo_steep": {"name": "sapo", "tau_positive": 2.0, "tau_negative": 3.0},
    "dppo": {"name": "dppo", "loss_denominator": 16.0},
    "dppo_kl": {"name": "dppo", "divergence": "kl", "divergence_bound": 0.02, "weight_max": 1.5},
    "rgra": {"name": "rgra"},
    "kl_cov": {"name": "kl_cov", "covariance_share": 0.3, "penalty": 0.5},
    "kl_cov_one_token": {"name": "kl_cov"},
    "pass_at_k": {"name": "pass_at_k"},
    "remax": {"name": "remax", "loss_denominator": 16.0, "kl_beta": 0.05},
    "distill": {"name": "distill", "kl_beta": 0.7},
    "luspo": {"name": "luspo", "clip_epsilon": 0.3, "clip_epsilon_high": 0.4, "loss_denominator": 4.0},
    "vespo": {"name": "vespo"},
    "vespo_steep": {"name": "vespo", "k_positive": 1.0, "lambda_positive": 4.0, "k_negative": 2.0,
                    "lambda_negative": 5.0, "kl_beta": 0.05},
    "gdpo": {"name": "gdpo", "std_floor": 0.01},
    "optimal_token_baseline": {"name": "optimal_token_baseline", "loss_denominator": 16.0},
    "rloo_shrinkage": {"name": "rloo", "kl_beta": 0.05, "baseline": "shrinkage"},
    "grpo_kl_in_reward": {"name": "grpo", "kl_beta": 0.1, "kl_in": "reward", "kl_estimator": "k1", "std_floor": 0.01},
    "grpo_token_sum": {"name": "grpo", "kl_beta": 0.1, "loss_denominator": 5.0},
    "dr_grpo_k3_in_reward": {"name": "dr_grpo", "kl_beta": 0.1, "kl_in": "reward", "loss_denominator": 16.0},
}  # fmt: skip

PART_WEIGHTS = (1.0, 0.5)  # of the two rewards in `parts`
CENTRED = ("dr_grpo", "maxrl", "opo", "dppo", "pass_at_k", "remax")
TOKEN_MEAN = ("dapo", "cispo", "ppo", "reinforce_plus_plus", "lite_ppo", "kl_cov", "distill", "vespo")


def batch(lengths, rewards, group_size, *, moved=0.3, steps=None, seed=0):
    """Inputs as nested lists over each row's own completion tokens; `steps` is {token: reward} for each row."""
    draw = random.Random(seed)

    def numbers(spread, shift=0.0):
        return [[round(shift + draw.gauss(0, spread), 3) for _ in range(n)] for n in lengths]

    old = [[-abs(x) - 0.1 for x in row] for row in numbers(1.0)]
    change, away = numbers(moved), numbers(0.4)
    given = {
        "lengths": lengths,
        "rewards": rewards,
        "group_size": group_size,
        "greedy": [0.25 * (i + 1) for i in range(len(rewards) // group_size)],
        "steps": steps,
        "old": old,
        "now": [[round(o + c, 3) for o, c in zip(*pair, strict=True)] for pair in zip(old, change, strict=True)],
        "ref": [[round(o + a, 3) for o, a in zip(*pair, strict=True)] for pair in zip(old, away, strict=True)],
        "old_values": numbers(0.3, 0.4),
        "values": numbers(0.3, 0.4),
        "entropy": [[abs(x) for x in row] for row in numbers(1.0)],
        "parts": [(r, 0.0 if len(set(rewards)) == 1 else round(draw.random(), 1)) for r in rewards],
    }
    # of the sampled token and of as much again, at most, of the others
    given["collision"] = [
        [math.exp(2 * x) + draw.random() * (1 - math.exp(x)) ** 2 for x in row] for row in given["old"]
    ]
    return given


def inputs():
    steps = [{0: 0.5, 2: 1.0}, {1: 0.25}, {0: -1.0, 3: 0.5}, {}]
    return {
        "two_groups": batch([3, 1, 4, 2, 2, 5], [1.0, 0.0, 0.25, 0.0, 1.0, 1.0], 3),
        "moved_far": batch([3, 2, 4, 1], [1.0, 0.0, 0.0, 1.0], 4, moved=1.5, seed=1),
        "on_policy": batch([3, 2, 4, 1], [1.0, 0.0, 0.0, 1.0], 2, moved=0.0, seed=2),
        "length_one": batch([1, 1, 1, 1], [1.0, 0.0, 0.0, 0.5], 4, seed=3),
        "an_empty_row": batch([2, 0, 3, 1], [1.0, 0.0, 0.0, 1.0], 2, seed=4),
        "an_empty_group": batch([0, 0, 3, 1], [1.0, 0.0, 0.0, 1.0], 2, seed=9),
        "single_tokens_moved_far": batch([1, 1, 1, 1], [0.0, 1.0, 0.5, 0.5], 2, moved=1.0, seed=10),
        "negative_rewards": batch([4, 4, 2, 4], [-1.0, 0.2, 1.0, -1.0], 2, seed=5),
        "equal_rewards": batch([2, 3, 1], [0.5, 0.5, 0.5], 3, seed=6),
        "one_sample_each": batch([2, 3, 1], [1.0, 0.0, 1.0], 1, seed=7),
        "steps": batch([3, 2, 4, 2], [1.5, 0.25, -0.5, 0.0], 2, steps=steps, seed=8),
    }


def answers(s, given):
    """What an objective with the settings `s` must give: advantages, loss, gradient by log-probs, what is reported."""
    advantages, returns = advantages_of(s, given)
    now, values = given["now"], given["values"]

    def policy_loss(logprobs):
        return loss_of(s, given, logprobs, advantages, fixed=now)

    result = {
        "advantages": advantages,
        "policy_loss": policy_loss(now),
        "gradient": differences(policy_loss, now),
        "clip_fraction": clip_fraction(s, given, advantages),
        "kl_old": weighted(s, given, lambda b, t: k("k3", given["old"][b][t], now[b][t])),
    }
    if returns is not None:
        result["returns"] = returns
        result["critic_loss"] = value_loss(s, given, values, returns)
        result["value_gradient"] = differences(lambda moved: value_loss(s, given, moved, returns), values)
    if s["kl_beta"] > 0:
        result["kl_reference"] = weighted(s, given, lambda b, t: k("k3", now[b][t], given["ref"][b][t]))
    return result


def differences(function, rows):
    """Central differences of `function` by every number of `rows`."""
    result = [[0.0] * len(row) for row in rows]
    for b, row in enumerate(rows):
        for t in range(len(row)):
            sides = []
            for sign in (1, -1):
                moved = [list(r) for r in rows]
                moved[b][t] += sign * STEP
                sides.append(function(moved))
            result[b][t] = (sides[0] - sides[1]) / (2 * STEP)
    return result


def k(estimator, logp, logq):
    d = logq - logp
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


def groups_of(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def centred(values):
    return [v - mean(values) for v in values] if len(set(values)) > 1 else [0.0] * len(values)


def standardised(values, floor, spread=None):
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    return [(v - mean(values)) / ((deviation(values) if spread is None else spread) + floor) for v in values]


def optimal(rewards, tokens):
    """OPO: less the mean reward of the group's tokens."""
    baseline = sum(r * n for r, n in zip(rewards, tokens, strict=True)) / max(1, sum(tokens))
    return [r - baseline for r in rewards] if len(set(rewards)) > 1 else [0.0] * len(rewards)


def lead(rewards, tokens):
    """Pass@k: what the group's best reward would lose without each answer."""
    return [max(rewards) - max(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]


def earned(given, b):
    """Rewards of row b on its tokens."""
    rewards = [0.0] * given["lengths"][b]
    if given["steps"] is not None:
        for t, r in given["steps"][b].items():
            rewards[t] += r
    elif rewards:
        rewards[-1] = given["rewards"][b]
    return rewards


def advantages_of(s, given):
    name, size, lengths = s["name"], given["group_size"], given["lengths"]
    if name in ("ppo", "reinforce_plus_plus"):
        return token_advantages(s, given)
    if name == "distill":
        pairs = zip(given["old"], given["ref"], strict=True)
        return [[s["kl_beta"] * (q - p) for p, q in zip(old, ref, strict=True)] for old, ref in pairs], None
    if name == "rloo":
        totals = list(given["rewards"])
        for b, n in enumerate(lengths):
            totals[b] -= s["kl_beta"] * sum(given["old"][b][t] - given["ref"][b][t] for t in range(n))
        rows, groups = [], groups_of(totals, size)
        for i, group in enumerate(groups):
            towards, w = shrinkage(groups[:i] + groups[i + 1 :]) if s["baseline"] == "shrinkage" else (0.0, 0.0)
            rows += [r - (1 - w) * (sum(group) - r) / (size - 1) - w * towards for r in group]
        return [[a] * n for a, n in zip(rows, lengths, strict=True)], None
    if name == "online_dpo":
        return [[a] * n for a, n in zip(pushes(s, given), lengths, strict=True)], None
    if name == "remax":
        baselines = [greedy for greedy in given["greedy"] for _ in range(size)]
        return [[r - a] * n for r, a, n in zip(given["rewards"], baselines, lengths, strict=True)], None
    if name in ("opo", "pass_at_k"):
        parts = zip(groups_of(given["rewards"], size), groups_of(lengths, size), strict=True)
        rows = [a for rewards, tokens in parts for a in (optimal if name == "opo" else lead)(rewards, tokens)]
        return [[a] * n for a, n in zip(rows, lengths, strict=True)], None
    if name == "optimal_token_baseline":
        return [[token_lead(given, b, t) for t in range(n)] for b, n in enumerate(lengths)], None
    if name == "gdpo":
        sums = [0.0] * len(lengths)
        for k, weight in enumerate(PART_WEIGHTS):
            own = [a for group in groups_of([row[k] for row in given["parts"]], size)
                   for a in standardised(group, s["std_floor"])]  # fmt: skip
            sums = [total + weight * a for total, a in zip(sums, own, strict=True)]
        return [[a] * n for a, n in zip(standardised(sums, s["std_floor"]), lengths, strict=True)], None
    if s.get("kl_in") == "reward" and s["kl_beta"] > 0:  # the sum over each row's tokens is paid with its last one
        given, s = paid(s, given), {**s, "kl_in": "loss"}
    spread = None
    if name == "lite_ppo" or s.get("std_over") == "batch":
        every = given["rewards"] if given["steps"] is None else [r for row in given["steps"] for r in row.values()]
        spread = deviation(every)

    def normal(values):
        if name == "maxrl":
            right = any(value > 0 for value in values)
            least = max(map(abs, values), default=0.0) / max(len(values), 1)
            return [a / max(mean(values), least) if right else 0.0 for a in centred(values)]
        return centred(values) if name in CENTRED else standardised(values, s["std_floor"], spread)

    if given["steps"] is None:
        rows = [a for group in groups_of(given["rewards"], size) for a in normal(group)]
        return [[a] * n for a, n in zip(rows, lengths, strict=True)], None
    result = []
    for first in range(0, len(lengths), size):
        events = [(b, t, r) for b in range(first, first + size) for t, r in given["steps"][b].items()]
        scores = normal([r for _, _, r in events])
        result += [
            [sum(a for (row, at, _), a in zip(events, scores, strict=True) if row == b and at >= t)
             for t in range(lengths[b])]
            for b in range(first, first + size)
        ]  # fmt: skip
    return result, None


def token_lead(given, b, t):
    """OTB: the row's reward less that of the group's rows that reach token t, weighted by their energy up to there."""
    first = b - b % given["group_size"]
    group = range(first, first + given["group_size"])
    rewards = dict(zip(group, centred(given["rewards"][first : first + given["group_size"]]), strict=True))
    pairs = {row: list(zip(given["old"][row], given["collision"][row], strict=True)) for row in group}
    alive = {row: before[: t + 1] for row, before in pairs.items() if len(before) > t}
    energy = {row: sum(1 - 2 * math.exp(p) + c for p, c in before) for row, before in alive.items()}
    if len(energy) == 1:
        return rewards[b]
    return rewards[b] - sum(rewards[row] * w for row, w in energy.items()) / sum(energy.values())


def shrinkage(others):
    """The James-Stein baseline's target and its weight, from the other groups."""
    if not others:
        return 0.0, 0.0
    means = [mean(group) for group in others]
    noise = mean([deviation(group) ** 2 / len(group) for group in others])
    apart = mean([(m - mean(means)) ** 2 for m in means])
    return mean(means), len(others) / (len(others) + 1) * (noise / (noise + apart) if noise else 0.0)


def paid(s, given):
    """The rewards less kl_beta times each row's KL to the reference, at the sampling policy."""
    pairs = zip(given["old"], given["ref"], strict=True)
    cost = [s["kl_beta"] * sum(k(s["kl_estimator"], p, q) for p, q in zip(*row, strict=True)) for row in pairs]
    steps = given["steps"] and [dict(row) for row in given["steps"]]
    for row, c, n in zip(steps or (), cost, given["lengths"], strict=bool(steps)):
        row[n - 1] = row.get(n - 1, 0.0) - c
    rewards = [r - c for r, c in zip(given["rewards"], cost, strict=True)]
    return {**given, "rewards": rewards, "steps": steps}


def token_advantages(s, given):
    """Advantages (and, with a critic, returns) per token: GAE of PPO, reward to go of REINFORCE++."""
    advantages, returns = [], []
    for b, n in enumerate(given["lengths"]):
        rewards = earned(given, b)
        if s["kl_beta"] > 0 and s.get("baseline") != "group":
            rewards = [
                r - s["kl_beta"] * k("k1", given["old"][b][t], given["ref"][b][t]) for t, r in enumerate(rewards)
            ]
        if s["name"] == "ppo":
            v = [*given["old_values"][b], 0.0]
            deltas = [rewards[t] + s["gamma"] * v[t + 1] - v[t] for t in range(n)]

            def summed(lam, deltas=deltas, n=n):
                return [sum((s["gamma"] * lam) ** (u - t) * deltas[u] for u in range(t, n)) for t in range(n)]

            alpha = s["length_adaptive_alpha"]  # in a row of 5 tokens it is 1 - 1/2, in one of 2 it would be -1/4
            row = summed(s["gae_lambda"] if alpha is None or not n else max(0, 1 - 1 / (alpha * n)))
            own = s["gae_lambda"] if s["gae_lambda_critic"] is None else s["gae_lambda_critic"]
            returns.append([a + v[t] for t, a in enumerate(summed(own))])
        else:
            if s["baseline"] == "group" and n:
                first = b - b % given["group_size"]
                group = given["rewards"][first : first + given["group_size"]]
                rewards[-1] -= mean(group)
            row = [sum(s["gamma"] ** (u - t) * rewards[u] for u in range(t, n)) for t in range(n)]
        advantages.append(row)
    if s.get("whiten_advantages", True):
        flat = [a for row in advantages for a in row]
        scale = math.sqrt(mean([(a - mean(flat)) ** 2 for a in flat]) + 1e-8)
        advantages = [[(a - mean(flat)) / scale for a in row] for row in advantages]
    return advantages, returns if s["name"] == "ppo" else None


def pushes(s, given):
    """DPO: the derivative of the pair's loss by its margin (times kl_beta) at the sampling policy, signed."""
    gains = [sum(o - r for o, r in zip(*pair, strict=True)) for pair in zip(given["old"], given["ref"], strict=True)]
    result = []
    for first in range(0, len(gains), given["group_size"]):
        rewards = given["rewards"][first : first + given["group_size"]]
        row = [0.0] * len(rewards)
        if max(rewards) > min(rewards):
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            margin = s["kl_beta"] * (gains[first + best] - gains[first + worst])
            row[best], row[worst] = 1 / (1 + math.exp(margin)), -1 / (1 + math.exp(margin))
        result += row
    return result


def weighted(s, given, value):
    """The mean of value(row, token) as the objective aggregates; of Dr. GRPO and RLOO, what is reported."""
    lengths = given["lengths"]
    if s["name"] in TOKEN_MEAN:
        return sum(value(b, t) for b, n in enumerate(lengths) for t in range(n)) / sum(lengths)
    return sum(sum(value(b, t) for t in range(n)) / n for b, n in enumerate(lengths) if n) / len(lengths)


def loss_of(s, given, logprobs, advantages, fixed):
    name, lengths, old = s["name"], given["lengths"], given["old"]
    if name == "rloo":
        return -mean([surrogate(s, row_ratio(given, logprobs, b), advantages[b][0]) if n else 0.0
                      for b, n in enumerate(lengths)])  # fmt: skip
    if name == "online_dpo":
        return dpo_loss(s, given, logprobs)

    chosen = held(s, given, advantages) if name == "kl_cov" else ()

    def per_token(b, t):
        a, d = advantages[b][t], logprobs[b][t] - old[b][t]
        if name == "gmpo":  # the row's mean where it stands, with the gradient of the token's own clipped log-ratio
            logs = [bounded(s, x - o, y) for x, o, y in zip(fixed[b], old[b], advantages[b], strict=True)]
            value = -math.exp(mean(logs) + bounded(s, d, a) - logs[t]) * a
        elif name == "sapo":
            tau = s["tau_positive"] if a > 0 else s["tau_negative"]
            value = -4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1))) * a
        elif name == "dppo":
            weight = min(math.exp(fixed[b][t] - old[b][t]), s["weight_max"] or math.inf)
            kept = not beyond(s, old[b][t], fixed[b][t], a)
            value = -kept * weight * math.exp(logprobs[b][t] - fixed[b][t]) * a
        elif name == "rgra":
            value = -a * logprobs[b][t]
        elif name == "kl_cov":
            value = -math.exp(d) * a + s["penalty"] * abs(d) * ((b, t) in chosen)
        elif name == "cispo":
            weight = min(math.exp(fixed[b][t] - old[b][t]), 1 + s["clip_epsilon_high"])
            value = -weight * a * logprobs[b][t]
        elif name == "vespo":
            w = min(max(row_ratio(given, fixed, b), 1e-8), math.exp(20))
            power, decay = (s[f"{part}_{'positive' if a >= 0 else 'negative'}"] for part in ("k", "lambda"))
            value = -(w**power) * math.exp(decay * (1 - w)) * a * logprobs[b][t]
        elif name in ("gspo", "luspo"):  # the sequence's ratio, with the gradient of the token's own log-prob
            ratio = row_ratio(given, fixed, b) ** (1 / lengths[b]) * math.exp(logprobs[b][t] - fixed[b][t])
            value = -surrogate(s, ratio, a)
        else:
            value = -surrogate(s, math.exp(logprobs[b][t] - old[b][t]), a)
        elsewhere = name in ("ppo", "reinforce_plus_plus", "distill") and s.get("baseline") != "group"
        if s["kl_beta"] > 0 and not elsewhere and s.get("kl_in") != "reward":
            ratio = math.exp(d) if s.get("kl_importance_weighted") else 1
            value += s["kl_beta"] * ratio * k(s.get("kl_estimator", "k2"), logprobs[b][t], given["ref"][b][t])
        if name == "ppo":
            value -= s["entropy_bonus"] * given["entropy"][b][t]
        return value

    if s.get("loss_denominator") is not None:
        total = sum(per_token(b, t) for b, n in enumerate(lengths) for t in range(n))
        return total / len(lengths) / s["loss_denominator"]
    return weighted(s, given, per_token)


def surrogate(s, ratio, a):
    low = s["clip_epsilon"]
    if low is None:
        return ratio * a
    high = low if s.get("clip_epsilon_high") is None else s["clip_epsilon_high"]
    pessimistic = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    bound = s.get("ratio_bound")
    return max(pessimistic, bound * a) if bound is not None and a < 0 else pessimistic


def bounded(s, log_ratio, a):
    """GMPO: the log-ratio, cut on the side to which the advantage pushes it."""
    clip = s["clip_log_ratio"]
    return min(log_ratio, clip) if a > 0 else max(log_ratio, -clip) if a < 0 else log_ratio


def beyond(s, old, now, a):
    """DPPO: whether a token moved with its advantage, and too far."""
    p, q = math.exp(old), min(math.exp(now), 1.0)
    far = abs(p - q)
    if s["divergence"] == "kl":
        far = p * (old - math.log(q)) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    return (q - p) * a > 0 and far > s["divergence_bound"]


def held(s, given, advantages):
    """KL-Cov: the places of the tokens with the largest covariance at the sampling policy."""
    places = [(b, t) for b, n in enumerate(given["lengths"]) for t in range(n)]
    credit, logs = ([rows[b][t] for b, t in places] for rows in (advantages, given["old"]))
    shares = [(x - mean(credit)) * (y - mean(logs)) for x, y in zip(credit, logs, strict=True)]
    ranked = sorted(range(len(places)), key=lambda i: -shares[i])
    return {places[i] for i in ranked[: max(1, int(len(places) * s["covariance_share"]))] if shares[i] > 0}


def row_ratio(given, logprobs, b):
    return math.exp(sum(n - o for n, o in zip(logprobs[b], given["old"][b], strict=True)))


def dpo_loss(s, given, logprobs):
    """Each row of a pair: -log sigmoid of the margin with the partner where it was sampled, less half of the same at
    the sampling policy; the mean over groups. At the sampling policy that is the DPO loss."""
    total, push = 0.0, pushes(s, given)
    for b, p in enumerate(push):
        if p and given["lengths"][b]:  # a row without tokens weighs nothing
            margin = math.log(1 / abs(p) - 1)
            moved = math.copysign(s["kl_beta"], p) * math.log(row_ratio(given, logprobs, b))
            total += math.log(1 + math.exp(-margin - moved)) - 0.5 * math.log(1 + math.exp(-margin))
    return total / (len(push) / given["group_size"])


def clip_fraction(s, given, advantages):
    now, old = given["now"], given["old"]

    def cut(b, t):
        token = math.exp(now[b][t] - old[b][t])
        a = advantages[b][t]
        if s["name"] == "gmpo":
            return float(bounded(s, now[b][t] - old[b][t], a) != now[b][t] - old[b][t])
        if s["name"] == "dppo":
            return float(beyond(s, old[b][t], now[b][t], a))
        if s["name"] == "cispo":
            return float(token > 1 + s["clip_epsilon_high"])
        if s["name"] in ("online_dpo", "sapo", "rgra", "kl_cov", "vespo") or s["clip_epsilon"] is None:
            return 0.0
        if s["name"] in ("gspo", "luspo"):
            token = row_ratio(given, now, b) ** (1 / given["lengths"][b])
        if s["name"] == "rloo":
            token = row_ratio(given, now, b)
        return float(abs(surrogate(s, token, a) - token * a) > 1e-12)

    return weighted(s, given, cut)


def value_loss(s, given, values, returns):
    def per_token(b, t):
        v, before, target = values[b][t], given["old_values"][b][t], returns[b][t]
        near = before + min(max(v - before, -s["value_clip"]), s["value_clip"])
        return 0.5 * max((v - target) ** 2, (near - target) ** 2)

    return weighted(s, given, per_token)
