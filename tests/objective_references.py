"""What every objective must give on small batches, edge cases included, for test_objectives.py.

The second implementation follows the words of `Algorithm.objective`: each phrase that an algorithm tells is a key of
`ADVANTAGES`, `CLIPS`, `AGGREGATIONS` or `KLS`, so that words without their formula fail, and the reports that print
them are true. It is plain Python in float64, one function for each formula of the papers, and uses nothing of the
library. Gradients by log-probs are central differences of the written loss (a stop-gradient is a second argument that
stays fixed). Batches are nested lists over each row's own completion tokens; `s` are the settings of an algorithm.
"""

import math
import random
from functools import partial
from statistics import fmean as mean
from statistics import stdev as deviation

STEP = 1e-5  # of the central differences, whose error is then near 1e-9
FLOOR = 1e-4  # beside a standard deviation
PART_WEIGHTS = (1.0, 0.5)  # of the two rewards in `parts`


def batch(lengths, rewards, group_size, *, moved=0.3, steps=None, seed=0):
    """Inputs of one batch; `steps` is {token: reward} for each row."""
    draw = random.Random(seed)

    def numbers(spread, shift=0.0):
        return [[round(shift + draw.gauss(0, spread), 3) for _ in range(n)] for n in lengths]

    old = [[-abs(x) - 0.1 for x in row] for row in numbers(1.0)]
    change, away = numbers(moved), numbers(0.4)
    return {
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
        # of the sampled token and of as much again, at most, of the others
        "collision": [[math.exp(2 * x) + draw.random() * (1 - math.exp(x)) ** 2 for x in row] for row in old],
        "teacher": [[-abs(x) for x in row] for row in numbers(1.0)],
    }


STEPS = [{0: 0.5, 2: 1.0}, {1: 0.25}, {0: -1.0, 3: 0.5}, {}, {1: 0.7}, {}, {}, {}]
BATCHES = {
    "two_groups": batch([3, 1, 4, 2, 2, 5], [1.0, 0.0, 0.25, 0.0, 1.0, 1.0], 3),
    "four_groups": batch([1, 2, 1, 3, 2, 1, 2, 2], [1.0, 0.0, 1.0, 1.0, 0.5, 0.0, 0.0, 0.0], 2, seed=11),
    "three_groups": batch([1, 0, 0, 2, 1, 3, 1, 2, 1], [1.0, 0.0, 0.25, 1.0, 1.0, 0.0, 0.0, 0.0, 0.5], 3, seed=13),
    "equal_in_groups": batch([1, 2, 1, 1, 2, 1], [1.0, 1.0, 0.0, 0.0, 1.0, 1.0], 2, seed=14),
    "equal_in_all_groups": batch([1, 2, 1, 1, 2, 1], [0.5] * 6, 2, seed=15),
    "moved_far": batch([3, 2, 4, 1], [1.0, 0.0, 0.0, 1.0], 4, moved=1.5, seed=1),
    "on_policy": batch([3, 2, 4, 1], [1.0, 0.0, 0.0, 1.0], 2, moved=0.0, seed=2),
    "length_one": batch([1, 1, 1, 1], [1.0, 0.0, 0.0, 0.5], 4, seed=3),
    "an_empty_row": batch([2, 0, 3, 1], [1.0, 0.0, 0.0, 1.0], 2, seed=4),
    "an_empty_group": batch([0, 0, 3, 1], [1.0, 0.0, 0.0, 1.0], 2, seed=9),
    "single_tokens_moved_far": batch([1, 1, 1, 1], [0.0, 1.0, 0.5, 0.5], 2, moved=1.0, seed=10),
    "negative_rewards": batch([4, 4, 2, 4], [-1.0, 0.2, 3.0, -3.0], 2, seed=5),
    "equal_rewards": batch([2, 3, 1], [0.5, 0.5, 0.5], 3, seed=6),
    "one_sample_each": batch([2, 3, 1], [1.0, 0.0, 1.0], 1, seed=7),
    "steps": batch([3, 2, 4, 2, 2, 1, 1, 2], [1.5, 0.25, -0.5, 0.0, 0.7, 0.0, 0.0, 0.0], 2, steps=STEPS, seed=12),
}


def answers(s, words, given):
    """What an objective with the settings `s` must give: advantages, loss, gradient by log-probs, what is reported."""
    advantages = ADVANTAGES[words["advantage"]](s, given)
    assert words["kl"] in KLS and words["correction"] == "none"
    now, values = given["now"], given["values"]
    policy_loss = partial(loss_of, s, words, given, advantages, now)
    reported = partial(weighted, given, MEANS[words["aggregation"] == "mean over all tokens"])
    result = {
        "advantages": advantages,
        "policy_loss": policy_loss(now),
        "gradient": differences(policy_loss, now),
        "clip_fraction": reported(lambda b, t: cut(s, words, given, b, t, advantages[b][t])),
        "entropy": reported(lambda b, t: given["entropy"][b][t]),
        "kl_old": reported(lambda b, t: k("k3", given["old"][b][t], now[b][t])),
    }
    if words["advantage"].startswith("GAE"):
        own = s["gae_lambda"] if s["gae_lambda_critic"] is None else s["gae_lambda_critic"]
        gains = [to_go(deltas, s["gamma"] * own) for deltas in residuals(s, given)]
        returns = [[x + v for x, v in zip(*row, strict=True)] for row in zip(gains, given["old_values"], strict=True)]
        value_loss = partial(critic_loss, s, given, returns)
        result["returns"] = returns
        result["critic_loss"] = value_loss(values)
        result["value_gradient"] = differences(value_loss, values)
    if s["kl_beta"] > 0:
        result["kl_reference"] = reported(lambda b, t: k("k3", now[b][t], given["ref"][b][t]))
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


# Advantages, each [row][token].


def groups_of(rows, size):
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def on_tokens(given, rows):
    return [[a] * n for a, n in zip(rows, given["lengths"], strict=True)]


def centred(values):
    return [v - mean(values) for v in values] if len(set(values)) > 1 else [0.0] * len(values)


def standardised(values, spread=None):
    return [a / ((deviation(values) if spread is None else spread) + FLOOR) if a else a for a in centred(values)]


def over_mean(values):
    """MaxRL: 0 where nothing is right."""
    least = max(map(abs, values), default=0.0) / max(len(values), 1)
    return [a / max(mean(values), least) if any(v > 0 for v in values) else 0.0 for a in centred(values)]


def in_groups(normal, s, given):
    """Rewards of a group by `normal`; with steps, each token has the sum of what its row still earns."""
    given, size = paid(s, given), given["group_size"]
    if given["steps"] is None:
        return on_tokens(given, [a for group in groups_of(given["rewards"], size) for a in normal(group)])
    result = []
    for first in range(0, len(given["lengths"]), size):
        events = [(b, t, r) for b in range(first, first + size) for t, r in given["steps"][b].items()]
        scores = list(zip(events, normal([r for _, _, r in events]), strict=True))
        for b in range(first, first + size):
            row = [sum(a for (other, at, _), a in scores if other == b and at >= t) for t in range(given["lengths"][b])]
            result.append(row)
    return result


def paid(s, given):
    """With `kl_in: reward` the rewards less kl_beta times each row's KL at the sampling policy, at its last token."""
    if s.get("kl_in") != "reward":
        return given
    pairs = zip(given["old"], given["ref"], strict=True)
    cost = [s["kl_beta"] * sum(k(s["kl_estimator"], p, q) for p, q in zip(*row, strict=True)) for row in pairs]
    steps = given["steps"] and [dict(row) for row in given["steps"]]
    for row, c, n in zip(steps or (), cost, given["lengths"], strict=bool(steps)):
        row[n - 1] = row.get(n - 1, 0.0) - c
    return {**given, "rewards": [r - c for r, c in zip(given["rewards"], cost, strict=True)], "steps": steps}


def weighted_positive(s, given):
    rows = in_groups(standardised, s, given)
    return [[a * s["positive_weight"] if a > 0 else a for a in row] for row in rows]


def over_the_batch(s, given):
    every = given["rewards"] if given["steps"] is None else [r for row in given["steps"] for r in row.values()]
    return in_groups(partial(standardised, spread=deviation(every)), s, given)


def lead(s, given):
    """Pass@k: what the group's best reward would lose without each answer."""
    groups = groups_of(given["rewards"], given["group_size"])
    return on_tokens(given, [max(g) - max(g[:i] + g[i + 1 :]) for g in groups for i in range(len(g))])


def over_greedy(s, given):
    baselines = [greedy for greedy in given["greedy"] for _ in range(given["group_size"])]
    return on_tokens(given, [r - a for r, a in zip(given["rewards"], baselines, strict=True)])


def over_length_mean(s, given):
    """OPO: less the mean reward of the group's tokens."""
    result, size = [], given["group_size"]
    for rewards, tokens in zip(groups_of(given["rewards"], size), groups_of(given["lengths"], size), strict=True):
        baseline = sum(r * n for r, n in zip(rewards, tokens, strict=True)) / max(1, sum(tokens))
        result += [r - baseline if len(set(rewards)) > 1 else 0.0 for r in rewards]
    return on_tokens(given, result)


def over_token_baseline(s, given):
    """OTB: the row's reward less that of the group's rows that reach the token, weighted by their energy up to it."""

    def advantage(b, t):
        first = b - b % given["group_size"]
        group = range(first, first + given["group_size"])
        rewards = dict(zip(group, centred([given["rewards"][row] for row in group]), strict=True))
        pairs = {row: list(zip(given["old"][row], given["collision"][row], strict=True)) for row in group}
        alive = {row: before[: t + 1] for row, before in pairs.items() if len(before) > t}
        energy = {row: sum(1 - 2 * math.exp(p) + c for p, c in before) for row, before in alive.items()}
        if len(energy) == 1:
            return rewards[b]
        return rewards[b] - sum(rewards[row] * w for row, w in energy.items()) / sum(energy.values())

    return [[advantage(b, t) for t in range(n)] for b, n in enumerate(given["lengths"])]


def each_reward_apart(s, given):
    sums = [0.0] * len(given["lengths"])
    for part, weight in enumerate(PART_WEIGHTS):
        groups = groups_of([row[part] for row in given["parts"]], given["group_size"])
        own = [a for group in groups for a in standardised(group)]
        sums = [total + weight * a for total, a in zip(sums, own, strict=True)]
    return on_tokens(given, standardised(sums))


def leave_one_out(s, given):
    size, rows = given["group_size"], zip(given["rewards"], given["old"], given["ref"], strict=True)
    totals = [r - s["kl_beta"] * sum(o - q for o, q in zip(old, ref, strict=True)) for r, old, ref in rows]
    result, groups = [], groups_of(totals, size)
    for i, group in enumerate(groups):
        towards, w = shrinkage(groups[:i] + groups[i + 1 :]) if s["baseline"] == "shrinkage" else (0.0, 0.0)
        result += [r - (1 - w) * (sum(group) - r) / (size - 1) - w * towards for r in group]
    return on_tokens(given, result)


def shrinkage(others):
    """The James-Stein baseline's target and its weight, from the other groups."""
    if not others:
        return 0.0, 0.0
    means = [mean(group) for group in others]
    noise = mean([deviation(group) ** 2 / len(group) for group in others])
    apart = mean([(m - mean(means)) ** 2 for m in means])
    return mean(means), len(others) / (len(others) + 1) * (noise / (noise + apart) if noise else 0.0)


def pushes(s, given):
    """DPO: the derivative of the pair's loss by its margin (times kl_beta) at the sampling policy, signed."""
    gains = [sum(o - r for o, r in zip(*pair, strict=True)) for pair in zip(given["old"], given["ref"], strict=True)]
    result = []
    pairs = (groups_of(rows, given["group_size"]) for rows in (given["rewards"], gains))
    for rewards, lead in zip(*pairs, strict=True):
        row = [0.0] * len(rewards)
        if max(rewards) > min(rewards):
            best, worst = rewards.index(max(rewards)), rewards.index(min(rewards))
            push = 1 / (1 + math.exp(s["kl_beta"] * (lead[best] - lead[worst])))
            row[best], row[worst] = push, -push
        result += row
    return on_tokens(given, result)


def shares(s, given):
    """TPO: the old log-prob of each row's whole group, and the row's share of its probability, now and as a target."""
    result = []
    sums = groups_of([sum(row) for row in given["old"]], given["group_size"])
    for logs, rewards in zip(sums, groups_of(given["rewards"], given["group_size"]), strict=True):
        spread = math.sqrt(mean([a * a for a in centred(rewards)])) or 1.0
        pairs = zip(logs, centred(rewards), strict=True)
        tilted = [math.exp(v + a / spread / s["target_temperature"]) for v, a in pairs]
        every = sum(map(math.exp, logs))
        result += [(math.log(every), math.exp(v) / every, w / sum(tilted)) for v, w in zip(logs, tilted, strict=True)]
    return result


def to_target(s, given):
    return on_tokens(given, [q - p for _, p, q in shares(s, given)])


def target_loss(s, given, logprobs):
    """Each row with tokens: log of the group's probability - q * the row's log-prob, the others as they were sampled;
    both over the old probability of the group."""
    total = 0.0
    for row, old, (every, p, q) in zip(logprobs, given["old"], shares(s, given), strict=True):
        others = (1 - p) * math.exp(every)
        total += (math.log(others + math.exp(sum(row))) - every - q * (sum(row) - every)) if old else 0.0
    return total / (len(logprobs) / given["group_size"])


def to_teacher(s, given):
    pairs = zip(given["old"], given["ref"], strict=True)
    return [[s["kl_beta"] * (q - p) for p, q in zip(*rows, strict=True)] for rows in pairs]


def after_a_success(s, given):
    """SDPO, for rows whose group has another success; and GRPO's share."""
    result, size = [], given["group_size"]
    for b, outcome in enumerate(in_groups(standardised, s, given)):
        first = b - b % size
        others = [r for i, r in enumerate(given["rewards"][first : first + size]) if i != b - first]
        taught = (1 - s["outcome_share"]) * any(r >= s["success_reward"] for r in others)
        tokens = zip(given["teacher"][b], given["old"][b], outcome, strict=True)
        result.append([taught * (q - p) + s["outcome_share"] * a for q, p, a in tokens])
    return result


def token_rewards(s, given):
    """Rewards on the tokens of each row, less kl_beta times k1."""
    result = []
    for b, n in enumerate(given["lengths"]):
        first, group = b - b % given["group_size"], s.get("baseline") == "group"
        events = {n - 1: given["rewards"][b]} if given["steps"] is None else dict(given["steps"][b])
        if group:
            events[n - 1] = events.get(n - 1, 0.0) - mean(given["rewards"][first : first + given["group_size"]])
        beta = 0.0 if group else s["kl_beta"]
        row = zip(given["old"][b], given["ref"][b], strict=True)
        result.append([events.get(t, 0.0) - beta * (p - q) for t, (p, q) in enumerate(row)])
    return result


def to_go(row, discount):
    return [sum(discount ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))]


def residuals(s, given):
    """GAE's r_t + gamma * V_{t+1} - V_t; the value after a row's last token is 0."""
    rows = zip(token_rewards(s, given), given["old_values"], strict=True)
    return [[r + s["gamma"] * after - v for r, v, after in zip(row, v, [*v[1:], 0.0], strict=True)] if row else []
            for row, v in rows]  # fmt: skip


def whitened(rows):
    flat = [a for row in rows for a in row]
    scale = math.sqrt(mean([(a - mean(flat)) ** 2 for a in flat]) + 1e-8)
    return [[(a - mean(flat)) / scale for a in row] for row in rows]


def generalised(s, given):
    alpha = s["length_adaptive_alpha"]  # 0.4 in a row of 5 tokens: 1 - 1/2, in one of 2 it would be -1/4
    lams = [s["gae_lambda"] if alpha is None or not n else max(0, 1 - 1 / (alpha * n)) for n in given["lengths"]]
    return whitened([to_go(d, s["gamma"] * lam) for d, lam in zip(residuals(s, given), lams, strict=True)])


def whitened_to_go(s, given):
    return whitened([to_go(row, s["gamma"]) for row in token_rewards(s, given)])


IN_GROUP = "(r - mean) / (std + 0.0001) in the group"
ADVANTAGES = {
    IN_GROUP: partial(in_groups, standardised),
    f"{IN_GROUP}; positive: by positive_weight": weighted_positive,
    "(r - mean in the group) / (std + 0.0001) of the batch": over_the_batch,
    "r - mean in the group": partial(in_groups, centred),
    "(r - mean) / max(mean, max |r| / count) in the group, 0 where no r is positive": partial(in_groups, over_mean),
    "best - second best of the group for the best, 0 for the others": lead,
    "r - reward of the prompt's greedy answer": over_greedy,
    "r - sum(length * r) / sum(length) in the group": over_length_mean,
    "r - sum(W * r) / sum(W) in the group at each place, W the sum of 1 - 2 p + sum of p^2 up to there":
        over_token_baseline,
    f"sum of weight * {IN_GROUP} over rewards, then the same over the batch": each_reward_apart,
    "r - mean of the others in the group (shrunk towards the mean of the other groups: baseline)": leave_one_out,
    "+-sigmoid(-kl_beta * margin) for the best and the worst of the group, 0 for the others": pushes,
    "q - p of the group's probability: p the old share, q by p * exp((r - mean) / std / target_temperature)": to_target,
    "kl_beta * (log p_reference - log p) of each token": to_teacher,
    f"(1 - outcome_share) * (log p after another success of the group - log p) of each token, 0 without one, "
    f"+ outcome_share * {IN_GROUP}": after_a_success,
    "GAE(gamma, gae_lambda) from the critic, whitened over the batch's tokens": generalised,
    "(reward to go - mean) / std over the batch's tokens (less the group's mean first: baseline)": whitened_to_go,
}  # fmt: skip


# The loss of one token: (settings, batch, row b, token t, log-probs that move, those that stay, advantage).


def surrogate(s, ratio, a):
    low = s["clip_epsilon"]
    if low is None:
        return ratio * a
    high = low if s.get("clip_epsilon_high") is None else s["clip_epsilon_high"]
    pessimistic = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    bound = s.get("ratio_bound")
    return max(pessimistic, bound * a) if bound is not None and a < 0 else pessimistic


def row_ratio(given, logprobs, b):
    return math.exp(sum(n - o for n, o in zip(logprobs[b], given["old"][b], strict=True)))


def clipped_token(s, given, b, t, now, fixed, a):
    return -surrogate(s, math.exp(now[b][t] - given["old"][b][t]), a)


def clipped_mean(s, given, b, t, now, fixed, a):
    """GSPO: the sequence's ratio, with the gradient of the token's own log-prob."""
    return -surrogate(s, row_ratio(given, fixed, b) ** (1 / len(now[b])) * math.exp(now[b][t] - fixed[b][t]), a)


def clipped_product(s, given, b, t, now, fixed, a):
    return -surrogate(s, row_ratio(given, now, b), a) / len(now[b])


def clipped_weight(s, given, b, t, now, fixed, a):
    return -min(math.exp(fixed[b][t] - given["old"][b][t]), 1 + s["clip_epsilon_high"]) * a * now[b][t]


def masked_by_divergence(s, given, b, t, now, fixed, a):
    p, q = math.exp(given["old"][b][t]), min(math.exp(fixed[b][t]), 1.0)
    far = abs(p - q)
    if s["divergence"] == "kl":
        far = p * (given["old"][b][t] - math.log(q)) + (1 - p) * math.log((1 - p + 1e-8) / (1 - q + 1e-8))
    masked = (q - p) * a > 0 and far > s["divergence_bound"]
    weight = min(math.exp(fixed[b][t] - given["old"][b][t]), s["weight_max"] or math.inf)
    return 0.0 if masked else -weight * math.exp(now[b][t] - fixed[b][t]) * a


def bounded(s, log_ratio, a):
    """GMPO: the log-ratio, cut on the side to which the advantage pushes it."""
    clip = s["clip_log_ratio"]
    return min(log_ratio, clip) if a > 0 else max(log_ratio, -clip) if a < 0 else log_ratio


def geometric_mean(s, given, b, t, now, fixed, a, advantages):
    """The row's mean where it stands, with the gradient of the token's own clipped log-ratio."""
    logs = [bounded(s, *x) for x in zip([n - o for n, o in zip(fixed[b], given["old"][b], strict=True)], advantages[b],
                                        strict=True)]  # fmt: skip
    return -math.exp(mean(logs) + bounded(s, now[b][t] - given["old"][b][t], a) - logs[t]) * a


def gated(s, given, b, t, now, fixed, a):
    tau = s["tau_positive"] if a > 0 else s["tau_negative"]
    return -4 / tau / (1 + math.exp(-tau * (math.exp(now[b][t] - given["old"][b][t]) - 1))) * a


def soft_weight(s, given, b, t, now, fixed, a):
    w = row_ratio(given, fixed, b)
    power, decay = (s[f"{part}_{'positive' if a >= 0 else 'negative'}"] for part in ("k", "lambda"))
    return -(w**power) * math.exp(decay * (1 - w)) * a * now[b][t]


def penalised(s, given, b, t, now, fixed, a, advantages):
    """KL-Cov: the tokens with the largest covariance at the sampling policy pay for moving."""
    places = [(row, at) for row, n in enumerate(given["lengths"]) for at in range(n)]
    credit, logs = ([rows[row][at] for row, at in places] for rows in (advantages, given["old"]))
    shares = [(x - mean(credit)) * (y - mean(logs)) for x, y in zip(credit, logs, strict=True)]
    ranked = sorted(range(len(places)), key=lambda i: -shares[i])[: max(1, int(len(places) * s["covariance_share"]))]
    moved = now[b][t] - given["old"][b][t]
    return -math.exp(moved) * a + s["penalty"] * abs(moved) * ((b, t) in [places[i] for i in ranked if shares[i] > 0])


def plain(s, given, b, t, now, fixed, a):
    return -a * now[b][t]


RANGE = "1 - clip_epsilon to 1 + clip_epsilon_high, at most ratio_bound"
CISPO = "weight of each token, at most 1 + clip_epsilon_high; its gradient stays"
GMPO = "ratio of each token, exp(-clip_log_ratio) to exp(clip_log_ratio), before their geometric mean"
KL_COV = (
    "none; penalty * |log-ratio| on the covariance_share of tokens with the largest covariance, positive covariance "
    "only"
)
CLIPS = {
    f"ratio of each token, {RANGE}": clipped_token,
    f"ratio of each row (geometric mean of its tokens'), {RANGE}": clipped_mean,
    "ratio of each row (product of its tokens'), 1 -+ clip_epsilon; none by default": clipped_product,
    CISPO: clipped_weight,
    "probability of each token, masked where it moved on by a divergence above divergence_bound; the ratio, a weight "
    "without gradient, up to weight_max if set": masked_by_divergence,
    GMPO: geometric_mean,
    "gate on the ratio of each token, 4 / tau * sigmoid(tau * (ratio - 1))": gated,
    "weight of each row, ratio^k * exp(lambda * (1 - ratio)); ratio: product of its tokens'": soft_weight,
    KL_COV: penalised,
    "none": plain,
}
UNBOUND = {"clip_epsilon": None, "divergence_bound": math.inf}


def cut(s, words, given, b, t, a):
    """Whether the clip changes the token's loss; of CISPO its weight, of GMPO the token's own log-ratio."""
    now, moved = given["now"], given["now"][b][t] - given["old"][b][t]
    if words["clip"] == CISPO:
        return math.exp(moved) > 1 + s["clip_epsilon_high"]
    if words["clip"] == GMPO:
        return bounded(s, moved, a) != moved
    if not s.keys() & UNBOUND.keys():
        return False
    one, other = (CLIPS[words["clip"]](x, given, b, t, now, now, a) for x in (s, {**s, **UNBOUND}))
    return abs(one - other) > 1e-12


# Sums over tokens: the weight of a token of row b, with n tokens in each row.

SUM = "sum over all tokens / (rows * loss_denominator)"
PAIR = "sum over a row's tokens, one pair per group, mean over groups"
TARGET = "cross-entropy of p to q in the group, mean over groups"
AGGREGATIONS = {
    "mean over a row's tokens, then over rows": lambda s, n, b: 1 / len(n) / n[b],
    "mean over all tokens": lambda s, n, b: 1 / sum(n),
    SUM: lambda s, n, b: 1 / len(n) / s["loss_denominator"],
    f"{SUM}; of kept completions besides, replay_coefficient * (G - 1) / G^2 * mean -log p":  # by test_replay.py
    lambda s, n, b: 1 / len(n) / s["loss_denominator"],
    "sum over a row's tokens, then mean over rows": lambda s, n, b: 1 / len(n),
}
MEANS = [partial(AGGREGATIONS[words], {}) for words in list(AGGREGATIONS)[:2]]  # of what is reported


def weighted(given, weight, value):
    n = given["lengths"]
    return sum(weight(n, b) * value(b, t) for b in range(len(n)) for t in range(n[b]))


LOSS_KL = "kl_beta * kl_estimator to the reference, in the loss (times the token's ratio: kl_importance_weighted)"
TOKEN_KL = "kl_beta * k1 to the reference, in the reward of each token"
KLS = {LOSS_KL, f"{LOSS_KL}; or its sum over a row, before the group is compared (kl_in)", TOKEN_KL,
       f"{TOKEN_KL} (k2 beside the clip: baseline)", "kl_beta * k1 to the reference summed over the row, in the reward",
       "kl_beta, implied by the loss", "it is the advantage"}  # fmt: skip


def loss_of(s, words, given, advantages, fixed, now):
    bonus = s["entropy_bonus"] * weighted(given, MEANS[words["aggregation"] == "mean over all tokens"],
                                          lambda b, t: given["entropy"][b][t])  # fmt: skip
    own = {PAIR: dpo_loss, TARGET: target_loss}.get(words["aggregation"])
    more = [advantages] if words["clip"] in (GMPO, KL_COV) else []

    def token(b, t):
        value = 0.0 if own else CLIPS[words["clip"]](s, given, b, t, now, fixed, advantages[b][t], *more)
        if words["kl"].startswith("kl_beta * kl_estimator") and s.get("kl_in") != "reward":
            ratio = math.exp(now[b][t] - given["old"][b][t]) if s["kl_importance_weighted"] else 1
            value += s["kl_beta"] * ratio * k(s["kl_estimator"], now[b][t], given["ref"][b][t])
        elif s.get("baseline") == "group" and words["kl"].startswith(TOKEN_KL):
            value += s["kl_beta"] * k("k2", now[b][t], given["ref"][b][t])
        return value

    if own:
        return own(s, given, now) + weighted(given, MEANS[0], token) - bonus
    return weighted(given, partial(AGGREGATIONS[words["aggregation"]], s), token) - bonus


def dpo_loss(s, given, logprobs):
    """Each row of a pair: -log sigmoid of the margin with the partner where it was sampled, less half of the same at
    the sampling policy; the mean over groups. At the sampling policy that is the DPO loss."""
    total, rows = 0.0, pushes(s, given)
    for b, p in enumerate(row[0] if row else 0.0 for row in rows):  # a row without tokens weighs nothing
        if p:
            margin = math.log(1 / abs(p) - 1)
            moved = math.copysign(s["kl_beta"], p) * math.log(row_ratio(given, logprobs, b))
            total += math.log(1 + math.exp(-margin - moved)) - 0.5 * math.log(1 + math.exp(-margin))
    return total / (len(rows) / given["group_size"])


def critic_loss(s, given, returns, values):
    def token(b, t):
        v, before, target = values[b][t], given["old_values"][b][t], returns[b][t]
        near = before + min(max(v - before, -s["value_clip"]), s["value_clip"])
        return 0.5 * max((v - target) ** 2, (near - target) ** 2)

    return weighted(given, MEANS[1], token)
