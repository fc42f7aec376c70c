"""What numbers were measured with."""

import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_FIRST = ("command",)  # of several sessions, that of the first


def facts(processes: int, device: torch.device) -> dict[str, str]:
    return {
        "command": command(),
        "natgrad": _version("natgrad"),
        "torch": torch.__version__,
        "pytorch_optimizer": _version("pytorch_optimizer"),
        "python": platform.python_version(),
        "machine": machine(device),
        "threads": str(torch.get_num_threads()),
        "processes": str(processes),
    }


def joined(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """Of a comparison that goes on: what has changed stands beside what was."""
    found = dict(now)
    for name, value in before.items():
        parts = value.split("; ")
        if name in _FIRST or now.get(name, value) in parts:
            found[name] = value
        else:
            found[name] = "; ".join([*parts, now[name]])
    return found


def command() -> str:
    """As it was typed."""
    name, *rest = sys.argv or [""]
    path = Path(name)
    shown = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([shown or "python", *rest])


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    known = Path("/proc/cpuinfo")
    if known.exists():
        for line in known.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} logical cores"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
