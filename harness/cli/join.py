"""`cohort join`."""

from cohort.harness.cli import options
from cohort.harness.cli.commands import app, command

WORDS = "Stopping: this host leaves when its part of a trial has ended; Ctrl-C again stops at once."


@command(app, "join", "cohort join --runs /shared/runs")
def join(runs: options.Runs = options.RUNS) -> None:
    """Give this host's devices to trials of the runs folder that wait for hosts, one after another, until Ctrl-C.

    A trial waits where `cohort train` or `cohort study run` has --hosts and --listen. All hosts have the same runs
    folder in the same place, the same user and the same versions of Cohort and its libraries. Their network is private:
    what they tell each other is not encrypted.
    """
    from cohort.harness.console import terminal
    from cohort.harness.stop import stop_on_signals
    from cohort.harness.training import hosts

    with stop_on_signals(words=WORDS) as stop:
        terminal.say(f"Waiting for trials of {runs.resolve()} that want hosts; Ctrl-C ends this.", stderr=True)
        hosts.join(runs, "", stop)
