"""What TensorBoard's files have of a run."""

import pytest
from cohort.harness.record.events import EVENTS, read_events
from test_mirroring import COLUMN, a_copy, log_run, place_of


def test_tensorboard_has_the_metrics_and_the_levels_of_a_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import (  # pyright: ignore[reportMissingImports]
        EventAccumulator,
    )

    log = log_run(tmp_path, arm="big", seed="0", factors='{"algorithm.group_size": 8}')
    a_copy(tmp_path, "tensorboard").copy()
    found = EventAccumulator(str(place_of(tmp_path, "tensorboard")))
    found.Reload()
    times = [event["time"] / 1000 for event in read_events(log.directory / EVENTS) if event["type"] == "metrics"]
    assert [(e.step, e.value, e.wall_time) for e in found.Scalars(COLUMN)] == [
        (s, [0.25, 0.5][s], times[s]) for s in (0, 1)
    ]
    assert [(e.step, e.value) for e in found.Scalars("summary/test_accuracy")] == [(1, 0.75)]
    assert str(found.Scalars("policy/loss")[0].value) == "nan"
    told = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert all(word in told for word in (b"algorithm.group_size", b"8", b"big"))
    assert b'"group_size"' in found.Tensors("settings")[0].tensor_proto.string_val[0]
