"""Stores sampled rollouts as MLflow traces, so that its UI shows them filtered by run, step, correctness and reward.

A trace is one completion: the prompt as input, the completion as output, its graded properties as assessments; the
state of a wrong answer is ERROR. An id is a hash of run, step, split and position, so that a trace sent twice is stored
once. The client is the one of MLflow's own exporter (mlflow.tracing.client): it sends a trace with its assessments in
one request, at about a tenth of the cost of the public functions, which also need an open span.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from mlflow import MlflowClient, entities
from mlflow.tracing import constant
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from mlflow.utils import get_results_from_paginated_fn

from .store import storable

_BATCH = 32
_PREVIEW = 1000  # characters that MLflow keeps for its tables
_Row = Mapping[str, Any]  # a SampleRow of the event file
_Place = tuple[int, str, int]  # step, split, number of the row


class TraceWriter:
    """Writes the traces of one run; `known` holds the ids of the traces whose text the store has."""

    def __init__(self, uri: str, experiment_id: str, run_id: str, tags: Mapping[str, str]) -> None:
        self.uri, self.experiment_id, self.run_id, self.tags = uri, experiment_id, run_id, tags
        traces = _traces_of(uri, experiment_id, run_id)
        self.known = {t.trace_id for t in traces if TraceTagKey.SPANS_LOCATION in t.tags}

    def write(self, rows: Mapping[_Place, tuple[_Row, int]]) -> None:
        """Store the rollouts (row, milliseconds since 1970) that are not in `known`, in batches."""
        named = {"tr-" + _digest(self.run_id, *place): item for place, item in rows.items()}
        new = [(trace_id, *item) for trace_id, item in named.items() if trace_id not in self.known]
        client = TracingClient(self.uri)
        for start in range(0, len(new), _BATCH):
            batch = new[start : start + _BATCH]
            for one in batch:
                client.start_trace(self._info(*one))
            client.log_spans(self.experiment_id, [_span(*one) for one in batch])
            self.known |= {trace_id for trace_id, *_ in batch}

    def _info(self, trace_id: str, row: _Row, milliseconds: int) -> entities.TraceInfo:
        tokens = {"input_tokens": 0, "output_tokens": row["num_tokens"], "total_tokens": row["num_tokens"]}
        keys = {key: str(row[key]) for key in ("step", "split", "prompt_id", "num_tokens", "finish_reason")}
        tags = {"mlflow.traceName": f"{row['split']}, step {row['step']}", **self.tags, **keys}
        return entities.TraceInfo(
            trace_id=trace_id, trace_location=entities.TraceLocation.from_experiment_id(self.experiment_id),
            request_time=milliseconds, state=entities.TraceState.OK if row["correct"] else entities.TraceState.ERROR,
            request_preview=storable(row["prompt"])[:_PREVIEW], response_preview=storable(row["completion"])[:_PREVIEW],
            trace_metadata={
                TraceMetadataKey.SOURCE_RUN: self.run_id,
                TraceMetadataKey.TOKEN_USAGE: json.dumps(tokens),
                constant.TRACE_SCHEMA_VERSION_KEY: str(constant.TRACE_SCHEMA_VERSION),
            },
            tags={key: storable(value) for key, value in tags.items()},
            assessments=self._assessments(trace_id, row, milliseconds),
        )  # fmt: skip

    def _assessments(self, trace_id: str, row: _Row, milliseconds: int) -> list[entities.Assessment]:
        """`correct`, `reward`, one for each part of the reward (before its weight), and the expected answer."""
        common: dict[str, Any] = {
            "source": entities.AssessmentSource(source_type="CODE", source_id="cohort"), "trace_id": trace_id,
            "metadata": {"mlflow.assessment.sourceRunId": self.run_id}, "create_time_ms": milliseconds,
            "last_update_time_ms": milliseconds,
        }  # fmt: skip
        found: list[Any] = [entities.Feedback("correct", bool(row["correct"]), rationale=_answer(row), **common)]
        scores = {"reward": row["reward"], **{f"reward_{name}": v for name, v in row["rewards"].items()}}
        for name, value in scores.items():
            if value is not None and math.isfinite(float(value)):
                found.append(entities.Feedback(name, float(value), **common))
        found.append(entities.Expectation(name="expected_answer", value=storable(row["gold"]), **common))
        for assessment in found:
            assessment.assessment_id = "a-" + _digest(trace_id, assessment.name)
        return found


def _answer(row: _Row) -> str:
    return "no answer found" if row["answer"] is None else f"answered {storable(row['answer'])[:_PREVIEW]}"


def _span(trace_id: str, row: _Row, milliseconds: int) -> entities.Span:
    number = bytes.fromhex(trace_id.removeprefix("tr-"))
    attributes = {
        SpanAttributeKey.REQUEST_ID: trace_id, SpanAttributeKey.SPAN_TYPE: "LLM",
        SpanAttributeKey.INPUTS: {"prompt": storable(row["prompt"])},
        SpanAttributeKey.OUTPUTS: {"completion": storable(row["completion"])},
    }  # fmt: skip
    code, message = ("STATUS_CODE_OK", "") if row["correct"] else ("STATUS_CODE_ERROR", _answer(row))
    fields = {
        "trace_id": base64.b64encode(number).decode(), "span_id": base64.b64encode(number[:8]).decode(),
        "parent_span_id": None, "name": "rollout", "start_time_unix_nano": milliseconds * 1_000_000,
        "end_time_unix_nano": milliseconds * 1_000_000, "events": [], "status": {"code": code, "message": message},
        "attributes": {key: json.dumps(value) for key, value in attributes.items()},
    }  # fmt: skip
    return entities.Span.from_dict(fields)


def delete_traces(uri: str, experiment_id: str, run_id: str) -> None:
    """Delete the traces of a run that is being replaced."""
    ids = [trace.trace_id for trace in _traces_of(uri, experiment_id, run_id)]
    for start in range(0, len(ids), 100):  # MLflow's limit per request
        TracingClient(uri).delete_traces(experiment_id, trace_ids=ids[start : start + 100])


def _traces_of(uri: str, experiment_id: str, run_id: str) -> list[entities.TraceInfo]:
    wanted = f"metadata.`mlflow.sourceRun` = '{run_id}'"
    page = partial(MlflowClient(uri).search_traces, [experiment_id], wanted, include_spans=False)
    found = get_results_from_paginated_fn(lambda most, token: page(max_results=most, page_token=token), 500)
    return [one.info for one in found]


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()[:32]
