"""TensorBoard: metrics, levels and settings of each run as event files, which need no torch and no TensorFlow.

`tensorboard --logdir RUNS/mirrors/tensorboard` shows them; its tab HPARAMS compares arms by their levels.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ....interfaces import Mirror, MirroredRun


class TensorBoard(Mirror):
    """One event file for each run."""

    package = "tensorboard"

    def open(self, run: MirroredRun) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb  # pyright: ignore
        from tensorboard.plugins.text.summary_v2 import text_pb  # pyright: ignore
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # pyright: ignore

        levels = {key: run.tags[f"cohort.{key}"] for key in ("arm", "seed") if f"cohort.{key}" in run.tags}
        levels |= {path: str(level) for path, level in json.loads(run.tags.get("cohort.factors", "{}")).items()}
        lines = json.dumps(run.spec, indent=1).splitlines()
        self._writer, self._step = EventFileWriter(str(run.place)), 0
        self._begin = [hparams_pb(levels, run.id), text_pb("settings", "\n".join(f"    {line}" for line in lines))]

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore

        for event in events:
            self._step, seconds = event.get("step", self._step), event["time"] / 1000
            values = [Summary.Value(tag=key, simple_value=value) for key, value in self.numbers(event).items()]
            for summary in (*self._begin, Summary(value=values)):
                self._writer.add_event(Event(wall_time=seconds, step=self._step, summary=summary))
            self._begin = []
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
