"""Decides how MLflow shows a study: the columns of its table of runs, its first charts, its arms as coloured groups.

MLflow has no setting for this, so the view is written as its UI saves one (version 3.17): as a tag of the experiment.
Every server lists it in the menu "Views"; the pages of `cohort ui` open with it (`page.py`).
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base.arms import GREY

VIEW = "mlflow.sharedViewState.cohort"  # an experiment tag
COLORS = "cohort.colors"  # an experiment tag: group -> colour
RUN_COLOR = "mlflow.runColor"
MAX_TAG = 20_000  # characters of an experiment's tag
ARM = "cohort.arm"  # a tag of a trial's run, by which the table groups them; STUDY_GROUP for the parent run
STUDY_GROUP = "study"  # the parent run's ARM; without one, MLflow shows it under "Additional runs"
PHASE = "cohort.phase"  # a tag: the phase of a trial's arm, `exploratory` for a clone; STUDY_GROUP for the parent run
SHOWN = f"tags.`{PHASE}` != 'exploratory' and attributes.status != 'KILLED'"  # by the first view
NAME_COLUMN = "attributes.`Run Name`"


def color_tag(colors: Mapping[str, str]) -> tuple[str, str]:
    """The experiment's tag with the colours; if they do not fit, arms get MLflow's own."""
    text = json.dumps({STUDY_GROUP: GREY, **colors})
    return COLORS, text if len(text) <= MAX_TAG else json.dumps({STUDY_GROUP: GREY})


def read_view(tags: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """(view, colour of each group of runs) of an experiment, as the UI keeps them in a browser; None without a view."""
    if VIEW not in tags:
        return None
    try:
        view = json.loads(json.loads(tags[VIEW])["state"])
        colors = json.loads(tags.get(COLORS, "{}"))
        return view, {f"tag.{ARM}.{group}": color for group, color in colors.items()}
    except (ValueError, TypeError, KeyError, AttributeError):  # of another version, or changed by hand
        return None


def view_tag(metric: str, factors: Sequence[str], labels: Sequence[str]) -> tuple[str, str]:
    """The experiment's tag with the view of a study of these factors (their paths) and arms: runs grouped by arm,
    without clones and stopped trials, best first by the compared accuracy; the first chart has the metric's curves."""
    compared = "summary/test_accuracy" if metric == "validation/accuracy" else metric
    columns = ["tags.`cohort.state`", "tags.`cohort.seed`"]  # MLflow shows the mean of a group's parameters
    columns += [f"params.`{path}`" for path in factors]
    columns += [f"metrics.`{key}`" for key in dict.fromkeys([metric, "summary/test_accuracy"])]
    order = [NAME_COLUMN, *columns]
    names = max(280, 7 * min(max(map(len, labels), default=0) + 20, 100))  # pixels
    widths = {NAME_COLUMN: names} | {column: max(80, 24 + 7 * len(column.split("`")[1])) for column in columns}
    area = metric.rpartition("/")[0]
    section = {"uuid": "cohort", "name": area or "Model metrics", "display": True, "isReordered": True, "columns": 2}
    fixed = json.loads(Path(__file__).with_name("view.json").read_text("utf-8"))  # null: what follows here
    chart = {**fixed["chart"], "metricKey": metric, "displayName": metric}
    group = {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": ARM}]}
    own = {"orderByKey": f"metrics.`{compared}`", "selectedColumns": columns, "columnOrder": order, "groupBy": group}
    own |= {"columnWidths": widths, "compareRunCharts": [chart], "compareRunSections": [section], "searchFilter": SHOWN}
    view = {**fixed["view"], **own}
    return VIEW, json.dumps({"name": "Arms", "createdAt": 0, "updatedAt": 0, "state": json.dumps(view)})
