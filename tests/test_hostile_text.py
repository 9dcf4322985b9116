"""Text that a database refuses (NUL, lone surrogates, a megabyte) is recorded with those characters replaced."""

import pytest
from cohort.harness.mirror.store import connect
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import read_study
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import parse_study
from fake_trials import begin_study, in_mlflow, of_study
from test_tracking import a_spec, a_study

HOSTILE = "boom \0 and \ud800, then "
SHOWN = "boom \N{REPLACEMENT CHARACTER} and ?, then "

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.attack("NUL and broken Unicode in a reason")
def test_a_reason_that_a_file_store_refuses_is_recorded_with_its_characters_replaced(runs):
    study = a_study().model_copy(update={"question": HOSTILE})
    folder = begin_study(runs, study, f"cohort study run {HOSTILE}")
    arm = study.arm_labels()[0]
    tags = {**of_study(runs, "sizes", "one", arm=arm), "odd": HOSTILE}
    log = RunLog(runs, folder / "trials" / "one", a_spec(seed=0), experiment="sizes", run_name="t", tags=tags)
    log.metrics(0, {"validation/accuracy": 0.5})
    log.finish("failed", HOSTILE + "x" * 1_000_000, {})
    (trial,) = read_study(runs, "sizes").trials
    assert str(trial.reason).startswith(HOSTILE)
    run = connect(runs).get_run(in_mlflow(runs, log.directory))
    assert run.data.tags["cohort.reason"].startswith(SHOWN) and run.data.tags["odd"] == SHOWN


@pytest.mark.attack("NUL and broken Unicode in a label")
@pytest.mark.parametrize("label", ["a\0b", "a\ud800", "a\u202eb", "a\nb", "a  b", " a", "", "a" * 101])
def test_an_arm_whose_label_would_not_look_the_same_everywhere_is_refused(label):
    run = {"task": "arithmetic", "algorithm": "grpo"}
    with pytest.raises(SpecError, match="labels of arms must be 1 to 100 printable characters"):
        parse_study({"name": "s", "question": "?", "run": run, "arms": {label: {"steps": 3}}}, "s.yaml")
