"""Describes the machine, the versions and the CPU flags that a result was measured with."""

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from models.cpus import available_cpus, cpu_model

PACKAGES = ("tandem", "ray", "openvino", "opencv-python-headless", "numpy", "fastapi", "uvicorn")


def describe() -> dict[str, Any]:
    """Return command, time, CPU and versions, to be stored with every result."""
    return {
        "command": " ".join(["tandem", *sys.argv[1:]]),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "cores": available_cpus(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }
