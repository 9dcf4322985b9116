"""The page that compares two arms problem by problem: one HTML file, its data inside, filtered by its own script.

Text of models and files goes into the page as data and onto the screen as text nodes; the page's policy lets no other
script run and nothing load.
"""

import json
from base64 import b64encode
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from ....reports.render import html_environment, visible
from ...api.result import Result
from ...settings.errors import SpecError
from .reading import samples

SOLVED = {"a": "only A", "b": "only B", "both": "both", "neither": "neither"}
MOST_CHARS = 6000  # of a completion in the page
_SCRIPT = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


def page(result: Result, a: str, b: str, runs: Path) -> str:
    """The page of two arms of a study, with the samples of their last tests."""
    problems = compared(result, a, b)
    known = {one["id"]: one for one in problems}
    last: dict[tuple[str, int], int] = {}
    rows: list[dict[str, Any]] = []
    with suppress(SpecError):  # of a study whose trials keep no completions
        found = samples(result.folder, a, b, where="area == 'test'", runs=runs)
        rows = [row for row in found if row["problem"] in known]
    for row in rows:
        run = row["arm"], row["seed"]
        last[run] = max(last.get(run, 0), row["step"])
    seeds = sorted({seed for arm, seed in last if arm == a} & {seed for arm, seed in last if arm == b})
    for row in (row for row in rows if row["seed"] in seeds and row["step"] == last[row["arm"], row["seed"]]):
        one = known[row["problem"]]
        one |= {key: row[key] for key in ("prompt", "gold")}
        one["tags"] = {key: str(row[key]) for key in row.keys() - _FIELDS}
        text = row["completion"]
        text = text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} [{len(text) - MOST_CHARS:,} characters more]"
        told = [row["correct"], row["tokens"], row["cut"], row["run_on"], row["answer"], text]
        one["runs"].append([int(row["arm"] == b), row["seed"], -1 if row["greedy"] else row["sample"], *told])
    data = visible({"a": a, "b": b, "seeds": seeds, "problems": problems})
    embedded = json.dumps(data).replace("<", "\\u003c")
    code = b64encode(sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; script-src 'sha256-{code}'"
    shown = {"name": result.name, "a": visible(a), "b": visible(b), "policy": policy}
    template = html_environment(Path(__file__).parent).get_template("page.html")
    return template.render(**shown, data=Markup(embedded), script=Markup(_SCRIPT))


_FIELDS = {"arm", "seed", "step", "area", "problem", "family", "prompt", "gold", "sample", "greedy", "completion",
           "answer", "correct", "reward", "tokens", "cut", "run_on"}  # fmt: skip


def compared(result: Result, a: str, b: str) -> list[dict[str, Any]]:
    """The problems as plain data, the surest differences first."""
    frame: Any = result.compare_problems(a, b).sort_values(["p", "difference"], kind="stable")
    return [{
        "id": row.prompt_id, "family": row.family or "", "solved": SOLVED[row.solved_by], "p": row.p_holm,
        "needed": int(row.seeds_needed) if np.isfinite(row.seeds_needed) else None,
        "shares": [row.accuracy_a, row.accuracy_b], "tags": {}, "prompt": "", "gold": "", "runs": [],
    } for row in frame.astype({"family": object}).fillna({"family": ""}).itertuples()]  # fmt: skip
