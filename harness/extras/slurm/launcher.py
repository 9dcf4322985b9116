"""The workers of a study as jobs of SLURM, submitted through submitit.

A job runs what `cohort study work` runs, so it takes trials until none is left, and a trial cannot tell who started it.
submitit asks SLURM for SIGUSR2 some time before a job is ended. The worker then finishes its step, writes a checkpoint
and returns its trial; then submitit's handler requeues the job, which ends its allocation; everything is saved by then.
SIGTERM, from `scancel` or a preemption that sends no other signal, does the same, but SLURM decides what happens to the
job. Jobs outlive the command that submitted them.

submitit pickles a job into the study's folder; whoever may write there could run code in it, so the folder of the jobs
is the user's alone. submitit is imported when a study asks for it.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.disk import EXIT_STATUS, UNFIT, disk_full
from ...base.stop import LEAVE
from ...settings.errors import SpecError
from ...study.launchers.local import CORES_PER_GPU, Launcher, Pool, last_words, log
from ...study.pool import work
from ...study.worker import STORAGE

NEEDS = "submitit"
COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
SIGNAL_SECONDS = 120  # before SLURM ends a job: time for a step and a checkpoint
REFRESH_SECONDS = 15  # between two calls of sacct
HELD_SECONDS = 600.0  # how long a job that was sent SIGTERM waits for SLURM to end it, or to queue it again
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
         "REVOKED", "TIMEOUT", "FINISHED", "INTERRUPTED"}  # fmt: skip
OURS = ("array", "chdir", "error", "job-name", "open-mode", "output", "parsable", "requeue", "wrap")


def place(given: Sequence[str], wanted: int) -> "Slurm":
    """Jobs with these options of sbatch, NAME=VALUE or NAME alone; by default for 4 hours, with the `wanted` GPUs and
    CORES_PER_GPU cores for each."""
    asked: dict[str, str | bool] = {**({"gpus-per-node": str(wanted)} if wanted else {}), "time": "4:00:00"}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or "\n" in value:
            rule = "launcher slurm takes options of sbatch without their dashes, such as account=lab"
            raise SpecError(f"{rule}, got '{text}'")
        if name in OURS:
            raise SpecError(f"launcher slurm must leave {', '.join(OURS)} to Cohort, got '{text}'; leave it out")
        asked[name] = value if equals else True
    gpus = str(asked.get("gpus-per-node", "")).rpartition(":")[2]  # perhaps of a type: a100:2
    if gpus == "0":
        del asked["gpus-per-node"]
    elif gpus.isdecimal() and not {"cpus-per-gpu", "cpus-per-task"} & asked.keys():  # sbatch takes one of the two
        asked["cpus-per-task"] = str(CORES_PER_GPU * int(gpus))
    return Slurm(asked)


@dataclass(frozen=True)
class Job:
    """The program of a job: `work` with its options."""

    options: Mapping[str, Any]

    def __call__(self) -> tuple[int, str]:
        """Its exit status and last words."""
        try:
            _, signals = work(**self.options, storage=os.environ.get(STORAGE) or None)
        except Exception as error:
            full = disk_full(error, Path(self.options["runs"]))
            code = EXIT_STATUS if full else UNFIT if isinstance(error, ValueError) else 1
            return code, f"{type(error).__name__}: {error}"
        if signal.SIGINT not in signals:  # else the study was asked to stop
            if set(LEAVE) & set(signals):
                from submitit import JobEnvironment

                # submitit's handler is back in its place: it calls `checkpoint`
                signal.raise_signal(signal.Signals[f"SIG{JobEnvironment.USR_SIG}"])
            elif signal.SIGTERM in signals:
                time.sleep(HELD_SECONDS)
        return 0, ""

    def checkpoint(self) -> Any:
        """The job that is queued in its place: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


class SlurmPool(Pool):
    """Jobs of SLURM, waiting ones included."""

    _enough = False  # a job has ended because it found no trial to take
    _ending = False  # no trial remains

    def fill(self, wanted: int, waiting: int = 0) -> None:
        self._enough = self._enough and not waiting
        if not wanted and not self._ending:
            self._tell("--state=PENDING")  # they are no longer needed, and might wait for days
        self._ending = not wanted
        if not self._enough:
            super().fill(wanted, waiting)

    def collect(self, claims: int | None) -> int:
        if self.alive:
            (self.logs / "slurm").chmod(0o700)  # makes a shared disk refresh its listing
        return super().collect(claims)

    def _end_of(self, name: str, worker: Any) -> tuple[str, int, str] | None:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        state, paths = worker.state.partition(" ")[0], worker.paths
        if not paths.result_pickle.exists() and state not in ENDED:
            return None
        code, words = 0, ""
        if state == "CANCELLED":
            if not (self.stop.is_set() or self._ending):
                self.size -= 1
                log.warning("job %s was cancelled; the study continues with %d jobs", name, self.size)
                if not self.size:
                    self.stop.set()
        elif paths.result_pickle.exists():
            try:
                code, words = worker.result()
            except (FailedJobError, UncompletedJobError) as error:
                code, words = 1, str(error)
        else:
            there = paths.stderr.exists()
            words = last_words(paths.stderr) if there else f"it left no log: do all nodes share '{paths.folder}'?"
            code, words = -signal.SIGKILL, f"SLURM says {state}; {words}"
            worker.cancel(check=False)  # SLURM may have queued it again
        self._enough = self._enough or not code
        for file in (paths.submitted_pickle, paths.result_pickle):
            file.unlink(missing_ok=True)
        return f"job {name} (its full output is in {paths.stdout})", code, words

    def _ask_to_stop(self) -> None:
        self._tell("--state=PENDING")
        self._tell("--signal=INT")

    def _kill(self) -> None:
        self._tell()

    def _tell(self, *options: str) -> None:
        """Cancel the jobs, or send them a signal, or cancel those that wait."""
        if self.alive:
            subprocess.run(["scancel", *options, *self.alive], capture_output=True, check=False)

    def _start(self, count: int) -> None:
        """Submit so many new jobs, several as an array."""
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
        from submitit.helpers import environment_variables

        folder, asked = self.logs / "slurm", self.cluster.parameters
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        submitit.SlurmJob.watcher._delay_s = REFRESH_SECONDS
        executor = submitit.SlurmExecutor(folder, max_num_timeout=10**6)  # one queued again has come further
        cpus = [f"--{key}={value}" for key, value in asked.items() if key == "cpus-per-task"]
        executor.update_parameters(
            job_name=f"cohort-{self.options['name']}", array_parallelism=count, signal_delay_s=SIGNAL_SECONDS,
            srun_args=cpus,  # srun does not take it from sbatch
            additional_parameters={"requeue": True, **asked},
        )  # fmt: skip
        try:
            with environment_variables(**self.environment), executor.batch():
                jobs = [executor.submit(Job(self.options)) for _ in range(count)]
        except (FailedJobError, FailedSubmissionError, OSError) as error:
            self._note_end("sbatch", 1, str(error))
            return
        self.alive |= {job.job_id: job for job in jobs}


@dataclass(frozen=True)
class Slurm(Launcher):
    """The options of sbatch for each job: its resources, partition, time limit."""

    pool = SlurmPool
    parameters: Mapping[str, str | bool] = field(default_factory=dict)

    def check(self, runs: Path, workers: int | None) -> None:
        """SpecError if jobs cannot be submitted from here, or would not find the runs folder; SLURM itself is asked."""
        if workers is None:
            raise SpecError("launcher slurm needs `workers`, the number of jobs at a time; give it")
        if missing := [command for command in COMMANDS if shutil.which(command) is None]:
            rule, fix = "launcher slurm needs the commands of SLURM", "start the study on a login node of the cluster"
            raise SpecError(f"{rule}, '{missing[0]}' is not on PATH; {fix}")
        folder, own = runs.resolve(), Path(tempfile.gettempdir()).resolve()
        if folder.is_relative_to(own) or folder.is_relative_to("/dev/shm"):
            got, fix = f"'{folder}' is where each node has files of its own", "name one on a common disk with `runs`"
            raise SpecError(f"the jobs of launcher slurm must share the runs folder, and {got}; {fix}")
        if "%" in str(folder):
            rule = "the runs folder of launcher slurm must have no % in its path"
            raise SpecError(f"{rule}, got '{folder}', because SLURM fills it in; name another one with `runs`")
        flags = [f"--{key}" if value is True else f"--{key}={value}" for key, value in self.parameters.items()]
        test = ["sbatch", "--test-only", *flags, "--wrap=true"]
        tried = subprocess.run(test, capture_output=True, text=True, check=False)
        if tried.returncode:
            said = (tried.stderr.strip() or tried.stdout.strip()).replace("\n", "; ")
            raise SpecError(f"SLURM refuses a job with {' '.join(flags)} ({said}); change its options")
