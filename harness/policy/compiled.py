"""The layers of a model compiled in place (`torch.compile`), one after another, so that all share what is compiled.

A pass that reads or fills a cache is compiled again for every layer and length, so samplers run uncompiled layers
(`torch.compiler.set_stance`), and learners share no prompts. Lengths and numbers of rows are symbols from the start,
so only passes with and without gradient, of one row and of several, of policy, reference and critic are compiled.
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from ..devices.sharding import layers

BACKEND = "inductor"
LIMIT = 64  # kinds of pass, of all models of one class in this process; torch gives up compiling after 8


def compile_layers(module: nn.Module) -> None:
    """Compile a model's layers when they are first called; names of parameters and class stay."""
    torch._dynamo.config.recompile_limit = LIMIT
    for layer in layers(module):
        layer.compile(dynamic=True, backend=BACKEND)


def check_compiler(device: torch.device) -> None:
    """ValueError where torch.compile lacks what it needs for a device: a compiler, Python's headers, Triton."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    missing = None
    if device.type == "cuda" and find_spec("triton") is None:
        missing = "the package triton"
    elif shutil.which(compiler) is None:
        missing = f"the compiler {compiler} (or the one that CXX names)"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing = "the headers of Python (python3-dev)"
    if missing:
        raise ValueError(f"torch_compile must be false without {missing}, got true; install it or remove torch_compile")
