"""The functions of `import cohort`, which do what `cohort study run`, `cohort report` and `cohort evaluate` do.

Bad input is a ValueError before any model loads. The environment variables of the command line count here too:
COHORT_RUNS, COHORT_TRACKING_URI, COHORT_STORAGE.
"""

import os
import shlex
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ..cli import options
from ..cli.study import run_to_report, say_without_result, started_study
from ..cli.train import evaluated
from ..ground.stop import acknowledged
from ..spec import load
from ..spec.errors import SpecError
from ..spec.study import StudySpec
from .report import read_record

if TYPE_CHECKING:
    from .result import Evaluation, Result

# tqdm.auto, which transformers uses, asks notebooks without ipywidgets to install them; no bars are drawn here.
warnings.filterwarnings("ignore", "IProgress not found")


@dataclass(frozen=True)
class Study:
    """A study that can run: the file that it comes from, and the settings that were changed since."""

    source: str
    settings: Mapping[str, Any]
    spec: StudySpec = field(repr=False)

    @property
    def name(self) -> str:
        """The name of its folder in RUNS/studies."""
        return self.spec.name

    @property
    def question(self) -> str:
        return self.spec.question

    @property
    def arms(self) -> list[str]:
        """Labels of the arms that are compared, as far as they are known before it runs."""
        return self.spec.arm_labels()

    def with_set(self, /, **settings: Any) -> "Study":
        """The study with other settings, named as after `--set`: `with_set(steps=20, **{"algorithm.kl_beta": 0.1})`.

        A field of the study (`name`, `seeds`, `factors`, `metric`, ...) changes the study, any other the run of all
        arms. ValueError for a setting that is unknown, out of range, or varied by the study itself.
        """
        return _study(self.source, {**self.settings, **settings})


def load_study(name_or_path: str | Path) -> Study:
    """A shipped study by name (`cohort study list` shows them), or one from a YAML file."""
    return _study(str(name_or_path), {})


def run(study: Study | str | Path, *, workers: int | None = None, runs: str | Path | None = None) -> "Result":
    """Run every arm with every seed, once, and write the report, as `cohort study run` does; the study's result.

    Blocks until nothing is left to run, and shows progress. Ctrl-C (or the interrupt of a notebook) lets each trial
    finish its step and write a checkpoint, then raises KeyboardInterrupt; the same call continues. A trial that fails
    or becomes invalid is named and does not stop the others.

        study    from `load_study`, or a name or path; by the name alone, a study of the runs folder continues with the
                 settings that it was started with
        workers  trials at a time; by default one per GPU, or else one per core
        runs     folder of results, by default COHORT_RUNS or `runs`
    """
    from .result import Result

    folder = _runs(runs)
    count = options.num_workers("auto" if workers is None else str(workers))
    spec = None if isinstance(study, Study) else started_study(str(study), folder)
    command = ""  # a started study keeps the one that it has
    if spec is None:
        study = study if isinstance(study, Study) else load_study(study)
        command = options.shell(f"study run {shlex.quote(study.source)}", {"--set": _as_text(study.settings)})
        spec = study.spec
    storage = options.with_password(os.environ.get("COHORT_STORAGE") or None)
    with acknowledged(lambda words: print(words, file=sys.stderr, flush=True), leave=lambda _: None):
        try:
            status, record, _ = run_to_report(spec, folder, count, command, storage=storage)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same call continues where the study stopped") from None
    say_without_result(status, folder)
    return Result(record, folder / "studies" / record.name, folder)


def open_result(name_or_folder: str | Path, *, runs: str | Path | None = None) -> "Result":
    """The result of a study that has begun, by its name in the runs folder or by its own folder.

    Reads what `cohort report` reads: the study's folder, wherever it is.
    """
    from ..record.study import read_folder
    from .result import Result

    folder = Path(name_or_folder)
    if (folder / "study.json").is_file():
        folder = folder.resolve()
        store = folder.parent.parent if folder.parent.name == "studies" else None
    elif len(folder.parts) == 1:
        store = _runs(runs)
        folder = store / "studies" / folder
    else:
        raise SpecError(f"'{folder}' is not the folder of a study: it has no study.json")
    return Result(read_folder(folder) if store is None else read_record(folder.name, store), folder, store)


def evaluate(
    model: str | Path,
    task: str,
    *,
    split: str = "test",
    path: str | Path | None = None,
    samples: int | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
    runs: str | Path | None = None,
) -> "Evaluation":
    """Held-out accuracy of a model, as `cohort evaluate` measures it; a call that was cut off continues.

    The arguments:

        model     `tiny`, a Hub id, a model folder, a checkpoint, or the folder of a run
        task      by name; `path` says where its data are: a Hub id, a local file or folder
        split     train, validation or test
        samples   completions of each problem
        settings  dotted path -> value, as after `--set`
        name      of the folder RUNS/evaluate/NAME that keeps every completion
    """
    from ..run.evaluate import intervals
    from .result import Evaluation

    folder = _runs(runs)
    sets, data = _as_text(settings or {}), None if path is None else str(path)
    _, directory, result = evaluated(str(model), task, split, data, samples, sets, name, folder)
    return Evaluation(result, intervals(result), directory)


def _study(source: str, settings: Mapping[str, Any]) -> Study:
    return Study(source, dict(settings), load.load_study(source, _as_text(settings)))


def _runs(folder: str | Path | None) -> Path:
    return Path(folder or os.environ.get("COHORT_RUNS") or options.RUNS)


def _as_text(settings: Mapping[str, Any]) -> list[str]:
    """The settings as words after `--set`, from which the same values are read."""
    return [f"{path}={_yaml(path, value)}" for path, value in settings.items()]


def _yaml(path: str, value: Any) -> str:
    try:
        text = yaml.safe_dump(_plain(value), default_flow_style=True, width=float("inf"), allow_unicode=True)
    except yaml.YAMLError:
        kinds = "numbers, text, lists and mappings"
        raise SpecError(f"setting '{path}' must be made of {kinds}, got {type(value).__name__}") from None
    return text.removesuffix("...\n").strip()


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, tuples as lists, paths as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value
