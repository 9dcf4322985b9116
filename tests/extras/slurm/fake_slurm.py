"""A stand-in for SLURM on one machine: `install` puts its commands on PATH, jobs are processes of this machine.

What it knows lies in a folder: `calls.log`, and for each job, or task of an array, its state and the process of its
step. `slots` in there is the number of jobs that run at a time. A cancelled job has two seconds between SIGTERM and
SIGKILL.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "scontrol")
KILL_SECONDS = 2.0
SRUN = """#!/bin/sh
echo $$ > "$FAKE_STEP"
while :; do
  case $1 in
    --output | --error) shift 2 ;;
    -*) shift ;;
    *) exec "$@" ;;
  esac
done
"""


def install(folder: Path, monkeypatch: Any, slots: int = 4) -> Path:
    """The folder of what it knows."""
    state, commands = folder / "slurm", folder / "commands"
    state.mkdir(parents=True)
    commands.mkdir()
    (state / "slots").write_text(str(slots))
    for name in COMMANDS:
        file = commands / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {Path(__file__)} {state} {name} "$@"\n')
        file.chmod(0o755)
    (commands / "srun").write_text(SRUN)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), os.environ["PATH"]]))
    return state


def states(state: Path) -> dict[str, str]:
    """Job -> state."""
    return {file.stem: file.read_text() for file in sorted(state.glob("*.state"))}


def script(state: Path, job: str = "100") -> list[str]:
    """The lines of a job's script that SLURM reads, without their mark."""
    return re.findall(r"^#SBATCH (.*)$", (state / f"{job}.sh").read_text(), re.MULTILINE)


def sbatch(state: Path, arguments: list[str]) -> str:
    if "--test-only" in arguments:
        if "--partition=nowhere" in arguments:
            sys.exit("sbatch: error: invalid partition specified: nowhere")
        return ""
    number = 100 + len(list(state.glob("*.sh")))
    shutil.copy(arguments[0], state / f"{number}.sh")
    array = re.search(r"--array=0-(\d+)", Path(arguments[0]).read_text())
    for job in [f"{number}_{task}" for task in range(int(array[1]) + 1)] if array else [str(number)]:
        write(state / f"{job}.state", "PENDING")
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(state), "run", job], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return f"Submitted batch job {number}"


def run(state: Path, arguments: list[str]) -> str:
    (job,) = arguments
    number, _, task = job.partition("_")
    environment = {**os.environ, "SLURM_JOB_ID": number, "FAKE_STEP": str(state / f"{job}.step")}
    if task:
        environment |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task}
    output = next(word for word in script(state, number) if word.startswith("--output="))
    output = output.removeprefix("--output=").strip("'").replace("%j", job).replace("%A_%a", job)
    while state_of(state, job) == "PENDING":
        slot = next(filter(lambda one: take(state / f"slot-{one}"), range(int((state / "slots").read_text()))), None)
        if slot is None:
            time.sleep(0.1)
            continue
        write(state / f"{job}.state", "RUNNING")
        with Path(output).open("ab") as file:
            process = subprocess.run(["bash", str(state / f"{number}.sh")], env=environment, stdout=file, stderr=file)
        (state / f"slot-{slot}").rmdir()
        if state_of(state, job) == "REQUEUED":
            write(state / f"{job}.state", "PENDING")
        elif state_of(state, job) == "RUNNING":
            write(state / f"{job}.state", "FAILED" if process.returncode else "COMPLETED")
    return ""


def scancel(state: Path, arguments: list[str]) -> str:
    options = dict(word.removeprefix("--").split("=") for word in arguments if word.startswith("--"))
    for job in (word for word in arguments if not word.startswith("--")):
        now = state_of(state, job)
        if "signal" in options:
            with suppress(FileNotFoundError, ProcessLookupError):
                os.kill(int((state / f"{job}.step").read_text()), signal.Signals[f"SIG{options['signal']}"])
        elif now == "PENDING" or (now == "RUNNING" and "state" not in options):
            write(state / f"{job}.state", "CANCELLED by 1000")
            if now == "RUNNING":
                end(state, job)
    return ""


def scontrol(state: Path, arguments: list[str]) -> str:
    verb, job = arguments
    assert verb == "requeue"
    write(state / f"{job}.state", "REQUEUED")
    end(state, job)
    return ""


def sacct(state: Path, arguments: list[str]) -> str:
    asked = {arguments[i + 1] for i, word in enumerate(arguments) if word == "-j"}
    rows = [f"{job}|{now}|here" for job, now in states(state).items() if job.partition("_")[0] in asked]
    return "\n".join(["JobID|State|NodeList", *rows])


def end(state: Path, job: str) -> None:
    """SIGTERM now, SIGKILL later; from another process, for this one may belong to the job."""
    command = f"kill -TERM $0; sleep {KILL_SECONDS}; kill -KILL $0"
    with suppress(FileNotFoundError):
        step = (state / f"{job}.step").read_text().strip()
        subprocess.Popen(["sh", "-c", command, step], start_new_session=True, stderr=subprocess.DEVNULL)


def state_of(state: Path, job: str) -> str:
    return (state / f"{job}.state").read_text()


def write(file: Path, text: str) -> None:
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def take(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    known, name, *words = sys.argv[1:]
    if name != "run":
        with (Path(known) / "calls.log").open("a") as calls:
            calls.write(" ".join([name, *words]) + "\n")
    print(globals()[name](Path(known), words))
