"""Imports scores that other programs measured, as a study of the runs folder: reports read its record as any other.

A table (CSV, JSONL, parquet) has a row for each score. A folder holds ARM/SEED/ with the files of one run: sample logs
of lm-eval, details of lighteval, logs of inspect, completions that TRL, verl or NeMo-RL dump, or a table. A run is an
arm with a seed; its last step counts. Scores are taken as they are, but a run is invalid if its training log says so
(`gates`). Files are hostile: sizes are bounded before they are unpacked.

NeMo-RL's `log_batched_dict_as_jsonl` writes a line for each validation completion to `val_data_step<STEP>.jsonl`, with
lists of one: `content` [[{role, content}, ...]] and `rewards` [number]; `idx` is its place. A problem is the messages
before the assistant's first.
"""

import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import struct
import time
import uuid
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, ValidationError
from pydantic.types import FailFast

from ....reports.prose import wording
from ...api.result import Result
from ...api.settings import runs_folder, shell
from ...api.study import open_result
from ...base.files import publish_folder, read_json, write_json, write_text
from ...base.inputs import digest
from ...base.words import quoted
from ...data import Section
from ...record.events import EVENTS, event_line, summed
from ...record.provenance import versions
from ...record.run import INFO, RESULT, RunInfo
from ...record.study import STUDY, registered
from ...settings.claim import Claim, Listed
from ...settings.errors import SpecError, did_you_mean, parsed
from ...settings.raw import read_yaml
from . import gates

MOST_ROWS, MOST_RUNS, MOST_FILES = 2_000_000, 2_000, 10_000
MOST_BYTES, MOST_JSON = 2**29, 2**26  # of a file; of one JSON value, which takes up to 30 times its bytes in memory
_SUFFIXES = (".csv", ".jsonl", ".parquet", ".eval", ".json")
_HEAVY = ("completion", "model_response", "doc", "advantage")  # columns that hold no score
_KNOWN = ("arm", "seed", "problem", "sample", "step", "tokens", "family")  # what a row may say beside its score
_INSPECT = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partial, incorrect, no answer, as inspect counts them
_ZSTD = 93  # a zip file's number for it, which Python's own reader lacks
_Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=300)]], FailFast()]
_Counts = Annotated[list[Annotated[int, Field(ge=0, le=2**53)]], FailFast()]
_Run = dict[int, tuple[dict[str, dict[int, float]], list[float]]]  # step -> problem -> sample -> score; tokens


class Scores(BaseModel, coerce_numbers_to_str=True, allow_inf_nan=False):
    """Columns of scores, a row for each; an optional one is empty if nothing is known."""

    arm: _Words
    seed: _Counts
    problem: _Words
    score: Annotated[list[float], FailFast()] = Field(min_length=1, max_length=MOST_ROWS)
    sample: _Counts = []
    step: _Counts = []
    tokens: Annotated[list[Annotated[float, Field(ge=0)]], FailFast()] = []
    family: Annotated[list[Annotated[str, Field(max_length=300)]], FailFast()] = []


class _Claims(Section):
    claim: Annotated[list[Claim], Listed] = Field(default_factory=list)


def import_scores(
    scores: pd.DataFrame | str | Path,
    name: str,
    *,
    baseline: str | None = None,
    score: str | None = None,
    claims: Sequence[Mapping[str, Any]] = (),
    runs: str | Path | None = None,
) -> Result:
    """The result of a new study, RUNS/studies/NAME, of scores that something else measured.

    `scores` is a frame with the columns of a table, or a file or folder, as `cohort import` takes it; the other
    arguments are its options; `claims` are predictions as a study file has them, by default those of the folder's
    claims.yaml. The same scores again change nothing. ValueError with rule, value and fix for all others.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{,79}", name):
        raise SpecError(f"`name` must be letters, digits, '.', '_' or '-', at most 80, got {name!r:.100}; rename it")
    file = None if isinstance(scores, pd.DataFrame) else Path(scores) / "claims.yaml"
    raw = read_yaml(file) if file is not None and file.is_file() and not claims else {"claim": claims}
    predicted = parsed(_Claims, raw, "claims").claim  # before the scores are read
    inputs, command, faults = {}, "cohort.import_scores(frame)", dict[tuple[str, int], str]()
    if isinstance(scores, pd.DataFrame):
        frame = scores.rename(columns={"prompt_id": "problem", score or "accuracy": "score"})
        columns = {str(key): values.tolist() for key, values in frame.items() if key in Scores.model_fields}
    else:
        path, given = Path(scores), {"--as": name, "--baseline": baseline, "--score": score}
        columns, faults = _read(path, score, hashes := {})
        command = shell(f"cohort import {shlex.quote(str(path))}", given)
        inputs = {"scores": {path.name: hashes[path]}} if path in hashes else {}
    trials = _checked(columns, faults)
    trials |= {run: [] for run in faults if run not in trials}
    arms, seeds = list(dict.fromkeys(arm for arm, _ in trials)), sorted({seed for _, seed in trials})
    baseline = baseline or arms[0]
    if baseline not in arms:
        raise SpecError(f"`baseline` must be one of {quoted(arms):.400}, got '{baseline}'")
    # fixed before a score is looked at: arms of which no two share a seed are compared without pairs
    paired = len({seed for _, seed in trials}) < len(trials) or len(arms) < 2
    for arm in arms if paired else ():
        if not any((arm, seed) in trials and (baseline, seed) in trials for seed in seeds):
            raise SpecError(f"arms must share seeds with the baseline '{baseline}', as differences are taken seed by "
                            f"seed, and '{arm}' has none; number the runs of each arm 0, 1, 2")  # fmt: skip
    settings = {"name": name, "question": f"How do imported scores of {quoted(arms, 8)} compare?",
                "design": "imported", "metric": "test/accuracy", "baseline": baseline, "seeds": seeds}  # fmt: skip
    settings |= {} if paired else {"pairing": "none"}
    if predicted:
        settings["claim"] = [claim.model_dump(mode="json") for claim in predicted]
    fixed = registered(predicted, [claim.contrasts({arm: {} for arm in arms}) for claim in predicted])
    identity = digest([settings, sorted((*run, events) for run, events in trials.items()), *sorted(faults.items())])
    folder = runs_folder(runs) / "studies" / name
    if (folder / STUDY).exists() and read_json(folder / STUDY)["digest"] != identity:
        raise SpecError(f"'{folder}' holds another study, or other scores; import these under another name")
    if not (folder / STUDY).exists():
        about = {"id": uuid.uuid4().hex, "digest": identity, "inputs": inputs, "command": command, "labels": arms,
                 "versions": {**versions()}, "shown": {"factors": [], "colors": {}}, "amendments": [],
                 **({"registered": fixed} if predicted else {})}  # fmt: skip
        with publish_folder(folder) as new:
            write_json(new / STUDY, {**about, **settings}, sync=False)
            for arm, seed in itertools.product(arms, seeds) if paired else trials:
                events, why = trials.get((arm, seed), []), faults.get((arm, seed), "no scores of it")
                is_sound = bool(events) and (arm, seed) not in faults
                _write_trial(new / "trials", name, identity, arm, seed, events, None if is_sound else why)
    return open_result(name, runs=runs)


def _read(path: Path, score: str | None, hashes: dict[Path, str]) -> tuple[dict[str, Any], dict[tuple[str, int], str]]:
    """The columns of a file or a folder, as they stand there, and the runs that their logs make invalid; `hashes` gets
    the SHA-256 of what was read of each file."""
    found = defaultdict[str, list[tuple[Any, ...]]](list)  # name of a score -> its rows
    logs = defaultdict[tuple[str, int], dict[int, dict[str, float]]](dict)
    places: list[tuple[Path, dict[str, Any]]] = [(path, {})]
    if path.is_dir():
        folders = (os.path.join(place, name) for place, names, _ in os.walk(path) for name in names)  # links unfollowed
        if link := next(filter(os.path.islink, folders), None):
            raise SpecError(f"'{link}' is a link to a folder; put the folder itself there")
        files = [file for file in sorted(path.glob("*/*/**/*")) if file.suffix in _SUFFIXES and file.is_file()]
        runs = [(file, *file.relative_to(path).parts[:2]) for file in files]
        numbers = [re.fullmatch(r"(?:seed[-_=]?)?(\d{1,15})", seed) for _, _, seed in runs]
        places = [(file, {"arm": arm, "seed": n[1]}) for (file, arm, _), n in zip(runs, numbers, strict=True) if n]
        if not 0 < len(places) == len(files) <= MOST_FILES:
            raise SpecError(f"'{path}' must hold files of runs in ARM/SEED/ (grpo/0/a.csv), {MOST_FILES:,} at most; "
                            f"only {len(places):,} of {len(files):,} files are in ARM/SEED/")  # fmt: skip
    for file, place in places:
        try:
            for number, row in enumerate(_rows(file, hashes)):
                if place and row.keys() == {"step", "data"}:
                    logged = logs[place["arm"], int(place["seed"])].setdefault(int(row["step"]), {})
                    logged |= {k: math.nan if (v := row["data"][k]) is None else float(v)
                               for k in gates.READ & row["data"].keys()}  # fmt: skip
                    continue
                known, scores = _split(row, file, number, score)
                about = tuple(map({**known, **place}.get, _KNOWN))
                for name, value in scores.items():
                    found[name].append((*about, value))
                    if len(found[name]) > MOST_ROWS:
                        raise SpecError(f"scores must have at most {MOST_ROWS:,} rows, '{path}' has more; give means")
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError, csv.Error, struct.error,
                zipfile.BadZipFile) as error:  # fmt: skip
            if isinstance(error, SpecError):
                raise
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise SpecError(f"'{file}' holds no scores ({words:.120}); docs/import.md shows the formats") from None
    name = score or ("score" if "score" in found or len(found) != 1 else next(iter(found)))
    if name not in found:
        raise SpecError(f"'{path}' has no score '{name}'; {did_you_mean(name, list(found))}choose one with `score`: "
                        f"{', '.join(sorted(found)):.400}")  # fmt: skip
    columns = {key: [row[i] for row in found[name]] for i, key in enumerate((*_KNOWN, "score"))}
    columns = {key: values for key, values in columns.items() if any(value is not None for value in values)}
    return columns, {run: reason for run, log in logs.items() if (reason := gates.fault(log))}


def _rows(file: Path, hashes: dict[Path, str]) -> Iterator[Mapping[str, Any]]:
    """The rows of a file as it has them. It is read once, as it may change, and `hashes` gets its SHA-256."""
    if file.suffix not in _SUFFIXES or not file.is_file():
        raise SpecError(f"scores must be a file ({', '.join(_SUFFIXES)}) or a folder of ARM/SEED/, got '{file}'")
    if (size := file.stat().st_size) > (most := MOST_JSON if file.suffix == ".json" else MOST_BYTES):
        raise SpecError(f"'{file}' must have at most {most:,} bytes, got {size:,}; write its scores as a table")
    with file.open("rb") as stream:
        content = io.BytesIO(stream.read(size))
    hashes[file] = hashlib.sha256(content.getbuffer()).hexdigest()
    if file.suffix == ".csv":
        rows = csv.DictReader(io.TextIOWrapper(content, "utf-8-sig", newline=""), restkey="more", strict=True)
        _distinct("columns", rows.fieldnames or ())
        yield from rows
    elif file.suffix == ".jsonl":
        while line := content.readline(MOST_JSON):
            yield from [_json(line)] if line.strip() else []
    elif file.suffix == ".parquet":
        table = pq.ParquetFile(content)
        unpacked = sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
        if table.metadata.num_rows > MOST_ROWS or unpacked > MOST_BYTES:
            raise SpecError(f"'{file}' must have at most {MOST_ROWS:,} rows and {MOST_BYTES:,} bytes unpacked, got "
                            f"{table.metadata.num_rows:,} and {unpacked:,}; leave out the completions")  # fmt: skip
        _distinct("columns", table.schema_arrow.names)
        names = [name for name in table.schema_arrow.names if name not in _HEAVY]
        leaves = ["doc.id", "doc.task_name"] if "doc" in table.schema_arrow.names else []
        for batch in table.iter_batches(columns=[*names, *leaves]):
            yield from batch.to_pylist()
    else:  # of inspect, or TRL's log; other JSON has no samples
        with zipfile.ZipFile(content) if file.suffix == ".eval" else content as log:
            about = _member(log, "header.json") if isinstance(log, zipfile.ZipFile) else _json(log.read())
            samples = _member(log, "summaries.json") if isinstance(log, zipfile.ZipFile) else about.get("samples")
        yield from ({"step": one["step"], "data": one} for one in about.get("log_history", ()))
        for one in samples or ():
            yield {**one, "eval": about["eval"]["task"]}


def _member(log: zipfile.ZipFile, name: str) -> Any:
    """The JSON in a member of a zip file. ValueError for one that is too large."""
    member, stream = log.getinfo(name), log.fp
    if stream is None or member.file_size > MOST_JSON:
        raise ValueError(f"{name} must have at most {MOST_JSON:,} bytes, got {member.file_size:,}")
    if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with log.open(member) as unpacked:
            return _json(unpacked.read(member.file_size))  # without a number, what it unpacks has no bound
    if member.compress_type != _ZSTD:
        raise ValueError(f"{name} must be stored, deflated or packed with zstd")
    stream.seek(member.header_offset)
    stream.seek(sum(struct.unpack("<26xHH", stream.read(30))), 1)  # past the file's name and what else is said of it
    return _json(pa.decompress(stream.read(member.compress_size), member.file_size, codec="zstd", asbytes=True))


def _json(text: bytes) -> Any:
    """The JSON value. ValueError if an object has a key twice."""

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _distinct("keys", [key for key, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=made)


def _distinct(what: str, names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two {what} '{twice:.80}'")


def _split(
    row: Mapping[str, Any], file: Path, number: int, score: str | None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """(other values of a row, its scores by name), by the program that wrote it."""
    keys, known = row.keys(), row
    if "prompt_id" in keys:  # as `Result.problems` has it
        known = {**row, "problem": row["prompt_id"]}
    elif "problem" in keys:
        pass
    elif {"doc_id", "filter", "metrics"} <= keys:  # lm-eval: a row for each problem and filter
        task = file.name.removeprefix("samples_").rpartition("_")[0]
        scores = {f"{metric},{row['filter']}": row[metric] for metric in row["metrics"]}
        return {"problem": f"{task}/{row['doc_id']}/{row.get('doc_hash', '')[:16]}"}, scores
    elif {"eval", "id", "epoch"} <= keys:  # inspect: a row for each problem and epoch
        values = {name: one["value"] for name, one in (row["scores"] or {}).items()}
        scores = {name: _INSPECT.get(str(value), value) for name, value in values.items()}
        return {"problem": f"{row['eval']}/{row['id']}", "sample": row["epoch"]}, scores
    elif {"doc", "metric"} <= keys:  # lighteval: a row for each problem
        return {"problem": f"{row['doc']['task_name']}/{row['doc']['id']}"}, _numbers(row["metric"])
    elif {"content", "rewards", "idx"} <= keys:  # NeMo-RL: a row for each completion, its messages and its reward
        if (step := re.fullmatch(r"val_data_step(\d{1,15})", file.stem)) is None:
            raise ValueError("of NeMo-RL's files only val_data_step*.jsonl are read; leave out the others")
        (messages,), (reward,) = row["content"], row["rewards"]
        asked = list(itertools.takewhile(lambda message: message["role"] != "assistant", messages))
        return {"problem": digest(asked), "sample": number, "step": int(step[1])}, {"rewards": reward}
    elif "step" in keys and not {"prompt", "input"}.isdisjoint(keys):  # TRL, verl: a row for each completion
        problem = digest(row["prompt"] if "prompt" in keys else row["input"])
        return {"problem": problem, "sample": number, "step": row["step"]}, _numbers(row)
    name = score or ("score" if "score" in keys else "accuracy")
    return known, {name: row[name]} if name in keys else {key: row[key] for key in keys if key not in _KNOWN}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if isinstance(value, int | float) and key != "step"}


def _checked(
    given: Mapping[str, Any], faults: Mapping[tuple[str, int], str]
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The events of each run. SpecError for the first fault of the columns; invalid runs may end anywhere."""
    try:
        scores = Scores.model_validate(given)
    except ValidationError as error:
        column, *row = (one := error.errors()[0])["loc"]
        if one["type"] == "missing":
            raise SpecError(f"scores must have a column {column} (or arm and seed as folders ARM/SEED/), got only "
                            f"{', '.join(given):.200}; add it") from None  # fmt: skip
        where = f"column {column} of the scores{''.join(f', row {int(place) + 1}' for place in row)}"
        got = f"got {one['input']!r:.80}; correct it" if row else f"got {len(one['input']):,}"
        raise SpecError(f"{where}: {one['msg'][0].lower()}{one['msg'][1:]}, {got}") from None
    if wrong := {arm: value for arm, value in zip(scores.arm, scores.score, strict=True) if not 0 <= value <= 1}:
        each = wording.listed([f"{value:g} in '{arm}'" for arm, value in wrong.items()])
        other = "name a column of fractions as `score` (verl's is acc)"
        fix = other if min(wrong.values()) < 0 else "divide percentages by 100"
        raise SpecError(f"scores must be fractions from 0 to 1 in all arms, {len(wrong)} of {len({*scores.arm})} have "
                        f"others (such as {each}); {fix}")  # fmt: skip
    runs, families, optional = defaultdict[tuple[str, int], _Run](dict), dict[str, str](), [0] * len(scores.score)
    for arm, seed, problem, value, sample, step, tokens, family in zip(
        *(values or optional for values in vars(scores).values()), strict=True
    ):
        scored, spent = runs[arm, seed].setdefault(step, ({}, []))
        if len(runs) > MOST_RUNS:
            raise SpecError(f"too many (arm, seed) pairs, at most {MOST_RUNS:,}; is the problem in the column seed?")
        if sample in (samples := scored.setdefault(problem, {})):
            raise SpecError(f"a run must score a problem once at a step, got '{problem}' of '{arm}', seed {seed}, step "
                            f"{step} twice; number several completions in a column sample")  # fmt: skip
        if family and families.setdefault(problem, family) != family:
            raise SpecError(f"a problem has one family, got '{family}' and '{families[problem]}' for '{problem}'")
        samples[sample] = value
        spent += [tokens] if scores.tokens else []
    ends = {run: max(steps) for run, steps in runs.items() if run not in faults} or {("", 0): 0}
    early, late = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
    if ends[early] < ends[late]:
        raise SpecError(f"runs must end at the same step to be compared, and '{early[0]}', seed {early[1]}, ends at "
                        f"{ends[early]}, '{late[0]}', seed {late[1]}, at {ends[late]}; leave out later steps, or the "
                        "column step for runs that are meant to differ in length")  # fmt: skip
    last = {run: runs[run][step][0].keys() for run, step in ends.items() if run in runs}
    problems = {problem for each in last.values() for problem in each}
    for (arm, seed), each in last.items():
        if lost := problems - each:
            raise SpecError(f"every run must score the same problems at its last step, and '{arm}', seed {seed}, lacks "
                            f"{len(lost):,} of {len(problems):,}, such as '{min(lost)}'; add them, with 0 for a failed "
                            "completion, or leave them out everywhere")  # fmt: skip
    return {run: _events(steps, families) for run, steps in runs.items()}


def _events(steps: _Run, families: Mapping[str, str]) -> list[dict[str, Any]]:
    """The events of a run. Earlier steps with the last one's problems are tests, too; others are training batches."""
    means = {step: {problem: fmean(each.values()) for problem, each in one.items()} for step, (one, _) in steps.items()}
    events, last = [], max(means)
    for step, one in sorted(means.items()):
        area = "test" if one.keys() == means[last].keys() else "train"
        values = {f"{area}/accuracy": fmean(one.values()), f"{area}/num_prompts": float(len(one))}
        values |= {"train/generated_tokens": max(steps[step][1])} if steps[step][1] else {}
        events.append({"type": "metrics", "step": step, "values": values})
    known = {"families": {problem: families[problem] for problem in means[last] if problem in families}}
    found = {"type": "per_problem", "step": last, "area": "test", "fractions": means[last]}
    return [*events, found | (known if known["families"] else {})]


def _write_trial(
    trials: Path, study: str, design: str, arm: str, seed: int, events: list[dict[str, Any]], reason: str | None
) -> None:
    """The record of a run, invalid for a reason; one without scores is, because nothing says why they are missing."""
    folder = trials / f"seed{seed}-{digest([arm, seed])}"
    tags = {"study": study, "arm": arm, "seed": str(seed), "factors": "{}", "phase": "final", "trial": folder.name}
    tags = {f"cohort.{key}": tag for key, tag in {**tags, "design": design}.items()}
    info = RunInfo(study, f"{arm} | seed {seed}", tags, {"seed": seed})
    latest = {key: value for event in events for key, value in event.get("values", {}).items()}
    reached = {"test_accuracy": "test/accuracy", "generated_tokens": "train/generated_tokens"}
    summary = {key: latest[metric] for key, metric in reached.items() if metric in latest}
    end = {"state": "invalid" if reason else "complete", "reason": reason, "summary": summary}
    folder.mkdir(parents=True)
    write_json(folder / INFO, vars(info), sync=False)
    lines = [{"type": "start", **info.identity(), "threads": ""}, *events, {"type": "finish", **end}]
    stamped = (summed({**event, "time": time.time_ns() // 1_000_000}) for event in lines)
    write_text(folder / EVENTS, "".join(map(event_line, stamped)), sync=False)
    write_json(folder / RESULT, {**end, "metrics": latest}, sync=False)
