"""The cores, GPUs and network interfaces of this machine, and the hosts over which this process's trials spread."""

import json
import os
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass
from functools import lru_cache

import psutil

HOSTS = "COHORT_HOSTS"  # environment variable, which workers inherit


@dataclass(frozen=True)
class Hosts:
    """The hosts that share a trial's devices; the first one listens at `address` and `port` (0: any free port).

    By default a trial has one host, and nothing listens.
    """

    count: int = 1
    address: str = ""
    port: int = 0
    group: str = ""  # hosts that join must name the same group

    def shares(self, devices: int) -> list[int]:
        """The devices of a trial on each of its hosts."""
        count = min(self.count, devices)
        return [devices * (host + 1) // count - devices * host // count for host in range(count)]

    def environment(self) -> dict[str, str]:
        return {HOSTS: json.dumps(asdict(self))}


def hosts() -> Hosts:
    """The hosts over which this process spreads its trials."""
    return Hosts(**json.loads(os.environ.get(HOSTS, "{}")))


def interface(address: str) -> str | None:
    """The network interface of this host that has the address or name."""
    try:
        ends = {str(end[4][0]) for end in socket.getaddrinfo(address, None)} if address else set()
    except OSError:
        return None
    return next((name for own, name in addresses().items() if own in ends), None)


def addresses() -> dict[str, str]:
    """The interface of each internet address of this host."""
    found = psutil.net_if_addrs().items()
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {own.address: name for name, owned in found for own in owned if own.family in kinds}


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def usable_gpus() -> tuple[str, ...]:
    """Names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return ()
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    gpus = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(i) for i, _ in enumerate(gpus))
