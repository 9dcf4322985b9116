"""What W&B's files have of a run."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from test_mirroring import COLUMN, a_copy, log_run, place_of


def wandb_records(folder: Path) -> list[Any]:
    """The records in W&B's offline file: blocks of 32 KiB (LevelDB's log) after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, at, parts, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
def test_wandb_has_the_metrics_settings_and_end_of_a_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_run(tmp_path, arm="big", seed="0")
    a_copy(tmp_path, "wandb").copy()
    wandb.teardown()  # as the end of a mirror's process does: what W&B has not written yet
    records = wandb_records(place_of(tmp_path, "wandb"))
    (run,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    config = {one.key: json.loads(one.value_json) for one in run.config.update}
    assert (run.project, run.run_group, run.display_name, run.run_id.isalnum()) == ("train", "big", "seed 0", True)
    assert config["algorithm"]["name"] == "grpo"
    rows = [
        {item.key or "/".join(item.nested_key): item.value_json for item in one.history.item}
        for one in records
        if one.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row[COLUMN], row["_step"]) for row in rows[:2]] == [("0", "0.25", "0"), ("1", "0.5", "1")]
    assert rows[1]["policy/loss"] in ("NaN", '"NaN"')
    assert "rollouts" in str(rows[2])
    summary = {
        i.key: i.value_json for one in records if one.WhichOneof("record_type") == "summary" for i in one.summary.update
    }
    assert (summary["summary/test_accuracy"], summary["state"]) == ("0.75", '"complete"')
    assert [one.exit.exit_code for one in records if one.WhichOneof("record_type") == "exit"] == [0]
