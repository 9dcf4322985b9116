"""A node of a cluster with a GPU that is pretended: the workers that its jobs start are in `pretend_cuda`, with the
fake vLLM. The process that submits the jobs is not."""

import os
from pathlib import Path
from typing import Any

BEGIN = """import os, sys
if "SLURM_JOB_ID" in os.environ and "cohort.harness.study.worker" in sys.orig_argv:
    import pretend_node
    pretend_node.begin()
"""
_held: list[Any] = []  # until the process ends


def install(plugins: Path, monkeypatch: Any) -> None:
    """Have every worker of a job begin with `begin`; `plugins` is on the path of all processes."""
    (plugins / "sitecustomize.py").write_text(BEGIN)
    monkeypatch.setenv("FAKE_VLLM", str(plugins / "vllm"))


def begin() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    import fake_vllm
    import pytest
    from pretend_cuda import pretend_cuda

    mode = pretend_cuda()
    mode.__enter__()
    fake_vllm.install(patch := pytest.MonkeyPatch(), Path(os.environ["FAKE_VLLM"]))
    _held.extend((mode, patch))
