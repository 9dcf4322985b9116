"""Starts the workers of a study in forks of a process that has loaded torch: a kill costs a second, not the imports.

What runs in a fork is `worker_main`, as in a worker of the product, with its environment, log file and session.
"""

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HOME = str(Path(__file__).resolve().parents[1])


class Zygote:
    """The process that forks. `start_worker` stands in for that of the local launcher."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}  # of its workers, beside what the launcher gives them
        self._lock = threading.Lock()
        paths = [HOME, os.environ.get("PYTHONPATH")]
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip

    def ask(self, *request: Any) -> Any:
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start_worker(
        self, options: Mapping[str, Any], devices: int, environment: Mapping[str, str], log_file: Path
    ) -> "Fork":
        assert devices == 1
        log_file.parent.mkdir(parents=True, exist_ok=True)
        command = ["fork", {**options, "parent": self._process.pid}, {**environment, **self.environment}, str(log_file)]
        return Fork(self, self.ask(*command))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Fork:
    """As far as a pool needs it, the `Popen` of a worker."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid, self._code = zygote, pid, None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._zygote.ask("poll", self.pid)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            threading.Event().wait(0.02)
        return code

    def terminate(self) -> None:
        self._signal(15)

    def kill(self) -> None:
        self._signal(9)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def fork(options: dict[str, Any], environment: dict[str, str], log_file: str) -> int:
    if pid := os.fork():
        return pid
    from cohort.harness.study.worker import STORAGE, worker_main

    code = 1
    try:
        os.setsid()
        with open(log_file, "ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.environ.update(environment)
        for folder in reversed(environment["PYTHONPATH"].split(os.pathsep)):
            sys.path.insert(0, folder)
        code = worker_main(**{**options, "runs": Path(options["runs"])}, storage=os.environ.get(STORAGE))
    except SystemExit as end:
        print(end, file=sys.stderr)
        code = 1
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


if __name__ == "__main__":
    import cohort.harness.policy.model
    import cohort.harness.run.loop
    import cohort.harness.study.worker  # noqa: F401

    for line in sys.stdin:
        verb, *words = json.loads(line)
        print(json.dumps(globals()[verb](*words)), flush=True)
