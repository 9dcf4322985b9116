"""Draws which setting mattered over all runs of studies: Optuna's parallel coordinates and importances, in one page.

Importances are fANOVA's, as in `study/search.py`. They add up to 1 even where chance alone is at work, so the page says
how much the settings explain at all, and where few seeds or values are behind one. `page.js` escapes what plotly would
read as markup, and the page's policy lets no other script run.
"""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from ....reports.prose.wording import short
from ....reports.render import html_environment, visible
from ....reports.trials import Outcome, score, usable_trials
from ...api.reporting import read_record
from ...api.settings import runs_folder
from ...base.arms import short_path
from ...base.files import write_text
from ...record.study import StudyRecord, keep_look


def importance(*studies: str, runs: str | Path | None = None) -> Path:
    """The page that shows which setting mattered in these studies, written below RUNS/reports; it needs plotly."""
    folder = runs_folder(runs)
    records = [read_record(name, folder) for name in dict.fromkeys(studies)]
    text, file = page(records), folder / "reports" / "+".join(studies) / "importance.html"
    for record in records:
        keep_look(folder / "studies" / record.name, record)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, text, sync=False)
    return file


def page(records: Sequence[StudyRecord]) -> str:
    """The page of these records. ValueError without plotly, or if their runs cannot tell."""
    if find_spec("plotly") is None:
        raise ValueError("the page of importances needs plotly; pip install 'cohort-rl[importance]'")
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingImports]

    metric, *others = dict.fromkeys(record.metric for record in records)
    if others:
        raise ValueError(f"studies must share their metric to be shown together, got {metric} and {others[0]}")
    records, outcome = visible(records), Outcome(metric, per_problem=False)
    runs = [(record.name, trial) for record in records for trial in usable_trials(record, outcome).values()]
    chosen, alike = settings([{**trial.spec, "study": {"name": name}} for name, trial in runs])
    seeds, values = (pd.Series([get(t) for _, t in runs]) for get in (lambda t: t.seed, lambda t: score(t, metric)))
    if chosen.empty or values.nunique() == 1:
        found = f"got {len(runs)} runs, {chosen.shape[1]} settings, {values.nunique()} values"
        raise ValueError(f"importances need complete runs that differ in a setting and in {metric}, {found}")
    values.index = pd.MultiIndex.from_frame(chosen)
    combinations: Any = values.groupby(level=[*range(chosen.shape[1])])
    free, within = len(runs) - combinations.ngroups, values - combinations.transform("mean")
    # epsilon squared (Kelley 1935); if no combination ran twice, nothing shows what chance does
    share = max(0.0, 1 - (within**2).sum() / free / values.to_numpy().var(ddof=1)) if free else None
    figures, rows = drawn(chosen, seeds, [*values]), []
    for name, part in zip(figures["bars"]["data"][0]["y"], figures["bars"]["data"][0]["x"], strict=True):
        fewest = seeds.groupby(chosen[name].to_numpy()).nunique().min()
        rows.append([name, part, chosen[name].nunique(), fewest, chosen[name].dtype.kind in "if"])
    scripts = [get_plotlyjs(), (Path(__file__).parent / "page.js").read_text(encoding="utf-8")]
    return html_environment(Path(__file__).parent).get_template("importance.html").render(
        records=records, metric=metric, runs=len(runs), alike=alike, share=share, combinations=combinations.ngroups,
        codes=[b64encode(sha256(script.encode()).digest()).decode() for script in scripts], rows=rows[::-1],
        data=Markup(json.dumps({**figures, "metric": metric}, default=list).replace("<", "\\u003c")),
        scripts=[*map(Markup, scripts)],
    )  # fmt: skip


def settings(specs: Sequence[Mapping[str, Any]]) -> tuple[pd.DataFrame, list[str]]:
    """A column of numbers or text for each setting in which runs differ; and in words those that others stand for,
    because they change together."""
    found, alike, first = pd.DataFrame(), list[str](), dict[tuple[int, ...], str]()
    frame: Any = pd.json_normalize([dict(spec) for spec in specs]).drop(columns="seed", errors="ignore")
    for path, levels in frame.items():
        name = path if short_path(path) in found else short_path(path)
        if levels.dtype.kind not in "if" or levels.isna().any():
            levels = levels.map(short, na_action="ignore").fillna("not set").astype(object)
        pattern = tuple(pd.factorize(levels)[0])
        if any(pattern) and first.setdefault(pattern, name) != name:
            alike.append(f"{first[pattern]} stands for {name} too")
        elif any(pattern):
            found[name] = levels
    return found, alike


def drawn(chosen: pd.DataFrame, seeds: pd.Series, values: Sequence[float]) -> dict[str, Any]:
    """The importances (`bars`) and the parallel `coordinates` of an Optuna study with a trial for each run, its seed
    among the settings, as plotly's data; and the names of the `axes` in full."""
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study, points, ranges = optuna.create_study(direction="maximize"), chosen.assign(seed=seeds), dict[str, Any]()
    for name, levels in points.items():
        known = sorted({*levels.tolist()})
        ranges[str(name)] = CategoricalDistribution(known)
        if len(known) > 6 and levels.dtype.kind in "if":  # a scale, which is logarithmic from a factor of 10 on
            ranges[str(name)] = FloatDistribution(known[0], known[-1], log=known[0] > 0 and known[-1] >= 10 * known[0])
    for point, value in zip(points.to_dict("records"), values, strict=True):
        study.add_trial(optuna.create_trial(params=point, distributions=ranges, value=value))  # pyright: ignore
    plots, evaluator = optuna.visualization, optuna.importance.FanovaImportanceEvaluator(seed=0)
    bars = plots.plot_param_importances(study, evaluator=evaluator, params=[*chosen])
    coordinates = plots.plot_parallel_coordinate(study).to_plotly_json()
    return {"bars": bars.to_plotly_json(), "coordinates": coordinates, "axes": sorted(ranges)}
