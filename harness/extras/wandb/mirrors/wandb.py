"""Weights & Biases: a project for each study (or WANDB_PROJECT), a group for each arm, a run for each trial.

W&B's own variables say where and as whom. With WANDB_MODE=offline, files go to RUNS/mirrors/wandb for `wandb sync`.
"""

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ....interfaces import Mirror, MirroredRun

ROLLOUTS = ("step", "split", "prompt", "completion", "gold", "answer", "correct", "reward")


class WeightsAndBiases(Mirror):
    """A W&B step is the number of the event: W&B takes none again, and repeated steps have the same numbers."""

    package = "wandb"

    def open(self, run: MirroredRun) -> None:
        wandb: Any = importlib.import_module("wandb")  # this file has its name
        quiet = {"console": "off", "silent": True, "disable_git": True, "save_code": False}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or run.experiment, group=run.tags.get("cohort.arm"), name=run.name,
            id=run.id, resume="allow", reinit="create_new", dir=str(run.place), config={**run.spec, **run.tags},
            settings=wandb.Settings(**quiet, x_disable_meta=True, x_disable_stats=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")
        self._table, self._number, self._status = wandb.Table(columns=[*ROLLOUTS]), 0, 1

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            if event["type"] == "metrics":
                if self._number >= self._run.starting_step:
                    row = {**self.numbers(event), "step": event["step"], "_timestamp": event["time"] / 1000}
                    self._run.log(row, step=self._number, commit=True)
                self._number += 1
            for row in event.get("rows", ()):
                self._table.add_data(*(row[column] for column in ROLLOUTS))
            if event["type"] == "finish":
                end = {"state": event["state"], "reason": event["reason"]}
                self._run.summary.update({**self.numbers(event), **end})
                self._status = int(event["state"] != "complete")

    def close(self) -> None:
        if self._table.data:
            self._run.log({"rollouts": self._table}, step=self._number)
        self._run.finish(self._status)
