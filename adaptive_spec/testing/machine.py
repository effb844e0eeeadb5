"""What a measurement was made on, for the report that it goes into."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def describe_machine(device: torch.device) -> dict[str, str]:
    """Device, driver, clocks as they are now, versions, commit."""
    about = {"device": "CPU, " + platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about["device"] = (
            f"{properties.name}, {properties.multi_processor_count} multiprocessors, "
            f"{properties.L2_cache_size / 2**20:.0f} MiB L2"
        )
        about |= _from_nvidia_smi("GPU-" + str(properties.uuid).removeprefix("GPU-"))
        about["cuda"] = str(torch.version.cuda)
    about |= {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
    return about


def commit() -> str:
    """Of the working tree; ADAPTIVE_SPEC_COMMIT says it where the files were copied without git."""
    if given := os.environ.get("ADAPTIVE_SPEC_COMMIT"):
        return given
    described = _run("git", "-C", str(_ROOT), "describe", "--always", "--dirty")
    return described or "unknown"


def _from_nvidia_smi(uuid: str) -> dict[str, str]:
    fields = ",".join(_SMI_FIELDS)
    line = _run("nvidia-smi", f"--id={uuid}", f"--query-gpu={fields}", "--format=csv,noheader")
    values = line.split(", ") if line else []
    return dict(zip(_SMI_FIELDS, values, strict=False))


def _run(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
