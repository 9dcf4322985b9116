"""Words that messages, terminals and reports share."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

# An interval such as [0.1, 2.3] is left readable; without "](" and "]:" it cannot become a link.
_MARKDOWN = re.compile(r"[\\`*_{}#|!~]|\[(?![-+.\d]+, [-+.\d]+\])|(?<=\])[(:\[]")


def in_markdown(value: object) -> str:
    """The value as one line of Markdown that makes no markup, element or image."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _MARKDOWN.sub(r"\\\g<0>", text).replace("$", "&#36;")  # where formulas are known, and where `\$` is not
    return " ".join(text.split("\n"))


def listed(names: Sequence[str], most: int = 3) -> str:
    """`a`, `a and b`, `a, b, c and 3 more`."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def quoted(labels: Sequence[str], most: int = 20) -> str:
    """Labels of arms as a list, each in quotes, as they may hold commas."""
    return listed([f"'{label}'" for label in labels], most)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """The question "did you mean ...?" with the word closest to `word` among 1,000 known; empty if none is close."""
    near = get_close_matches(word, list(known)[:1000], n=1, cutoff=cutoff)
    return f"did you mean '{near[0]}'? " if near else ""


def first_look(metrics: Mapping[str, float], limit: int | None) -> list[str]:
    """The likeliest causes of a weak first look, with the setting for each; at most two. The metrics are fractions of
    the completions: right, right if the last number counts, with a marked answer, cut at the limit of tokens."""
    names = ("accuracy", "lenient_accuracy", "answered", "truncated")
    accuracy, lenient, answered, truncated = (metrics[name] for name in names)
    found: list[str] = []
    if truncated > 0.5:
        more = f"sampling.max_tokens={2 * limit}" if limit else "twice the sampling.max_tokens"
        found.append(f"{truncated:.0%} are cut at the limit of tokens: try {more}, or end answers with sampling.stop")
    if answered < 0.5:
        found.append(
            f"{1 - answered:.0%} mark no answer ({lenient:.0%} are right if the last number counts): show the form "
            "(more task.shots, or cold_start.steps where a task has none), ask for it (prompt.system), or try another "
            "prompt.format"
        )
    if not found and accuracy in (0, 1):
        found.append(f"all are {'right: take harder' if accuracy else 'wrong: take easier'} problems or another model")
    return found


def without_signal(metrics: Mapping[str, float], limit: int | None, of: str = "the first step") -> str:
    """A warning if a step's metrics show no difference to learn from, with the causes; else empty."""
    if metrics.get("reward/std", 1.0) and metrics.get("train/zero_advantage_groups", 0.0) < 1:
        return ""
    seen = {name: metrics.get(f"train/{name}", math.nan) for name in ("accuracy", "lenient_accuracy", "answered")}
    causes = first_look({**seen, "truncated": metrics.get("completion/truncated", math.nan)}, limit)
    told = f"; of the completions, {' and '.join(causes)}" if causes else ""
    return f"no rewards of {of} differ, so nothing is learnt{told}"


def duration(seconds: float | None, unknown: str = "-") -> str:
    """Seconds as a person says them: `4.2 s`, `45 s`, `3 min 05 s`, `2 h 10 min`; `unknown` for None, NaN, infinity."""
    if seconds is None or not math.isfinite(seconds):
        return unknown
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 9.95 or not seconds else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
