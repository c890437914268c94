"""Files of the installed Ray that are read as text, before anything imports ray.

They show which environment variables Ray reads, and contain Serve's HAProxy template.
"""

import importlib.util
import mmap
from collections.abc import Iterable
from pathlib import Path

from app.calls.ray_compatibility import check_ray_version, left_out, mismatch
from app.environment import PROTECTING

# The files in which Ray reads its environment.
VARIABLES = (
    "serve/_private/constants.py",
    "_private/ray_constants.py",
    "_common/usage/usage_constants.py",
    "dashboard/modules/reporter/reporter_consts.py",
)
GCS = "core/src/ray/gcs/gcs_server"
HAPROXY_TEMPLATE = "serve/_private/haproxy_templates.py"


def check_variables(names: Iterable[str]) -> list[str]:
    """Check that Ray reads these variables: it ignores unknown variables without a message.

    Returns:
        A warning that names the variables not read, if any.

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
    """Whether the GCS reads a variable: then its binary contains the variable's name."""
    try:
        with _installed(GCS).open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError:
        return False
    with text:
        return text.find(name.encode("ascii") + b"\0") >= 0


def _source(file: str) -> str | None:
    """Return a file's text; None if the installed Ray lacks the file."""
    try:
        return _installed(file).read_text("utf-8")
    except OSError:
        return None


def _installed(file: str) -> Path:
    package = importlib.util.find_spec("ray")  # finds the package without importing it
    assert package is not None  # Ray's version was checked before
    assert package.origin is not None
    return Path(package.origin).parent / file
