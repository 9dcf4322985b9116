"""`cohort join`."""

from . import options
from .commands import app, command

WORDS = "Stopping when this host's part of the trial has ended; Ctrl-C again stops at once."


@command(app, "join", "cohort join --runs /shared/runs")
def join(runs: options.Runs = options.RUNS) -> None:
    """Give this host's devices to trials of the runs folder that wait for hosts, one after another, until Ctrl-C.

    `cohort train` and `cohort study run` wait for hosts if they have --hosts and --listen. All hosts need the same runs
    folder at the same path, the same user, and the same versions of Cohort and its libraries. Use a private network:
    the traffic between the hosts is not encrypted.
    """
    from ..console import terminal
    from ..devices import hosts
    from ..ground.stop import stop_on_signals

    with stop_on_signals(words=WORDS) as stop:
        terminal.say(f"Waiting for trials of {runs.resolve()} that need hosts; Ctrl-C ends this.", stderr=True)
        hosts.join(runs, "", stop)
