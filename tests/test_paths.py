"""A runs folder of any name keeps all its files inside or is refused; a copied one shows and changes itself alone."""

import os
import shutil
import urllib.request
from pathlib import Path

import fake_trials
import pytest
from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.follow import catch_up
from cohort.harness.mirror.store import check_runs_folder, moved_from
from cohort.harness.mirror.ui import serve_ui
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.record.evidence import write_evidence
from cohort.harness.record.study import read_study
from cohort.harness.study.queue import study_status
from cohort.harness.study.runner import run_study
from fake_trials import a_study, begin_study, free_port, in_mlflow
from mlflow import MlflowClient
from mlflow.tracking._tracking_service import utils
from queues import check_as_undisturbed, executions, run
from test_tracking import log_trial

TAKEN = ["#", "%", "%%", " ", "'", '"', "\u00e9", "e\u0301", "\u6f22", "\n", "\t", "\r", "\x01", "\x7f", "\u202e", "&",
         ";", "=", "+", "@", ":", "\\", "*", "[a]", "$", "~", "`", "<", "|", "!", "{parent}", "{}"]  # fmt: skip
AWKWARD = "".join(TAKEN)
REFUSED = ["?", "?a=b", "%20", "%3f", "\udcff"]


pytestmark = pytest.mark.usefixtures("plugins")


def contents(folder: Path) -> dict[bytes, bytes | None]:
    found = sorted(folder.rglob("*"))
    return {os.fsencode(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


@pytest.mark.slow
@pytest.mark.attack("Awkward characters in the path of the runs folder")
def test_a_study_in_a_folder_with_awkward_characters_keeps_all_its_files_there(tmp_path, new_runs, record_property):
    here = tmp_path / "here"
    runs = new_runs(here / AWKWARD)
    study = a_study(factors={"algorithm.group_size": [2]}, seeds=[0])
    status = run_study(study, runs, workers=1, command="", execute=fake_trials.EXECUTE)
    assert study_status("sizes", runs).all_valid and status.all_valid
    (trial,) = read_study(runs, "sizes").trials
    assert trial.per_problem == {"p1": 1.0} and len(trial.samples) == 7
    assert os.listdir(here) == [AWKWARD]
    record_property("tried", len(TAKEN))


@pytest.mark.attack("Paths that MLflow would read as another one")
@pytest.mark.parametrize("part", REFUSED, ids=ascii)
def test_a_path_that_does_not_survive_as_a_url_is_refused_and_nothing_is_written(part, tmp_path, cohort):
    before = contents(tmp_path)
    runs = tmp_path / "here" / f"a{part}b"
    with pytest.raises(ValueError, match=r"must not have '\?', '%' before two hexadecimal digits"):
        run_study(a_study(), runs, workers=1, command="", execute=fake_trials.EXECUTE)
    with pytest.raises(ValueError, match="choose another with `runs` or COHORT_RUNS"):
        in_mlflow(runs, begin_study(runs, a_study()))
    shutil.rmtree(tmp_path / "here")
    evaluate = ["evaluate", "tiny", "--task", "arithmetic"]
    train = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo"]
    for command in (["ui"], evaluate, train):
        assert cohort(*command, "--runs", runs) == 2
        assert "must not have '?'" in cohort.err
    assert contents(tmp_path) == before


@pytest.mark.long
@pytest.mark.attack("A copied runs folder")
def test_a_copied_folder_is_read_and_its_pages_show_its_own_files(tmp_path, new_runs):
    original = new_runs(tmp_path / "original")
    folder = begin_study(original, a_study())
    log = log_trial(original, "group_size=2", 0, "complete")
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("<p>yes")
    write_evidence(folder, read_study(original, "sizes"), "Yes.")
    catch_up(original)
    copy = tmp_path / AWKWARD
    shutil.copytree(original, copy)
    before, written = contents(original), contents(copy)
    assert repr(read_study(copy, "sizes")) == repr(read_study(original, "sizes"))
    catch_up(copy)
    assert contents(copy) == written
    lease = copy / "studies/sizes/trials/x/lease"
    lease.parent.mkdir()
    lease.touch()
    with pytest.raises(ValueError, match="a worker is at work in this folder or was when it was copied; use one path"):
        check_runs_folder(copy)
    shutil.rmtree(lease.parent)
    assert contents(copy) == written
    (original / "mlartifacts").rename(hidden := tmp_path / "hidden")  # so that nothing can come from there
    check_runs_folder(copy)
    assert moved_from(copy) is None and moved_from(original) is None
    catch_up(copy)
    address = f"http://127.0.0.1:{(port := free_port())}"
    with serve_ui(copy, port, "secret"):
        for place, name, content in (
            (log.directory.relative_to(original), "config.yaml", b"seed: 0\n"),
            (folder.relative_to(original), "report/index.html", b"<p>yes"),
        ):
            asked = f"{address}/get-artifact?run_uuid={MirrorState.load(copy / place).run_id}&path={name}"
            with urllib.request.urlopen(urllib.request.Request(asked, headers={"Authorization": "Bearer secret"})) as a:
                assert content in a.read()  # as the MLflow pages show it
    hidden.rename(original / "mlartifacts")
    assert contents(original) == before


@pytest.mark.slow
@pytest.mark.attack("A copied runs folder")
def test_a_study_goes_on_in_a_copy_of_its_runs_folder(runs, tmp_path):
    run(a_study(seeds=[0]), runs, workers=1)
    copy = Path(shutil.copytree(runs, tmp_path / "copy"))
    before = contents(runs)
    utils._artifact_repos_cache.clear()  # as in the new process that continues a copy
    assert run(a_study(seeds=[0, 1]), copy, workers=1).counts() == {"complete": 4}
    assert len(executions(copy)) == 4  # two of them before the copy
    check_as_undisturbed(a_study(seeds=[0, 1]), copy)
    assert contents(runs) == before
    found = MlflowClient(tracking_uri(copy)).search_runs(["1"])
    assert len(found) == 5 and all(one.info.artifact_uri.startswith(copy.as_uri() + "/") for one in found)
