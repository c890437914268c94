"""Files of the installed Ray that are read as text, before anything imports ray.

They show whether Ray reads the variables that protect the service, and contain Serve's HAProxy
template.
"""

import importlib.util
from collections.abc import Collection
from pathlib import Path

from app.calls.ray_compatibility import check_ray_version, mismatch
from app.environment import PROTECTING

# The files in which Ray reads the variables that protect.
VARIABLES = ("serve/_private/constants.py", "_private/ray_constants.py")
HAPROXY_TEMPLATE = "serve/_private/haproxy_templates.py"


def check_protecting(names: Collection[str]) -> None:
    """Check that Ray reads those of the variables that protect the service.

    Ray ignores unknown variables without a message.

    Raises:
        ConfigError: it does not read one of them, or is too old.

    """
    check_ray_version()
    read = "".join(_source(file) or "" for file in VARIABLES)
    if lost := [name for name in PROTECTING if name in names and f'"{name}"' not in read]:
        raise mismatch(f"it does not read {', '.join(lost)}")


def haproxy_template() -> str:
    """Return the source of the module with Serve's template of HAProxy's configuration."""
    check_ray_version()
    if (source := _source(HAPROXY_TEMPLATE)) is None:
        raise mismatch(f"it has no file {HAPROXY_TEMPLATE}")
    return source


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
