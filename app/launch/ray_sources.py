"""The files of the installed Ray that are read as text, before anything imports ray.

Which variables of the environment it reads, and Serve's template of HAProxy's configuration.
"""

import importlib.util
import mmap
from collections.abc import Iterable
from pathlib import Path

from app.calls.ray_compatibility import check_ray_version, left_out, mismatch
from app.environment import PROTECTING

# Where Ray reads its environment.
VARIABLES = (
    "serve/_private/constants.py",
    "_private/ray_constants.py",
    "_common/usage/usage_constants.py",
    "dashboard/modules/reporter/reporter_consts.py",
)
GCS = "core/src/ray/gcs/gcs_server"
HAPROXY_TEMPLATE = "serve/_private/haproxy_templates.py"


def check_variables(names: Iterable[str]) -> list[str]:
    """Check that Ray reads these variables: one that it does not know it ignores in silence.

    Returns:
        A warning that names those that it does not read, if there are any.

    Raises:
        ConfigError: one of them protects the service.

    """
    check_ray_version()
    known = "".join(_source(file) or "" for file in VARIABLES)
    lost = sorted(name for name in names if f'"{name}"' not in known)
    lost = [name for name in lost if not _is_in_gcs(name)]
    if refused := [name for name in lost if name in PROTECTING]:
        raise mismatch(f"it does not read {', '.join(refused)}")
    return [left_out(f"it does not read {', '.join(lost)}", "what they set")] if lost else []


def haproxy_template() -> str:
    """Return the source of the module with Serve's template of HAProxy's configuration."""
    check_ray_version()
    if (source := _source(HAPROXY_TEMPLATE)) is None:
        raise mismatch(f"it has no file {HAPROXY_TEMPLATE}")
    return source


def _is_in_gcs(name: str) -> bool:
    """Whether the GCS, which is no Python, knows a variable: its name is in the program's text."""
    try:
        with _installed(GCS).open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return False
    with text:
        return text.find(name.encode("ascii") + b"\0") >= 0


def _source(file: str) -> str | None:
    """Return a file's text; None if the installed Ray does not have it."""
    try:
        return _installed(file).read_text("utf-8")
    except OSError:
        return None


def _installed(file: str) -> Path:
    package = importlib.util.find_spec("ray")  # finds it without importing it
    assert package is not None  # its version is known
    assert package.origin is not None
    return Path(package.origin).parent / file
