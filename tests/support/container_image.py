"""The image of configs/docker, built by buildah, and its root folder to run commands from."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILDAH = shutil.which("buildah")
BASE = os.environ.get("TANDEM_TEST_BASE_IMAGE")  # an image with Python and apt
# Neither needs more than root has in a container of its own.
ENVIRONMENT = os.environ | {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
CERTIFICATES = "/etc/ssl/certs"  # of the network that the machine is in
READ_ONLY = """
mount --rbind --make-rprivate "$0" "$0"
mount -o remount,bind,ro "$0"
mount -t tmpfs -o mode=1777 tmpfs "$0/tmp"
mount --rbind /proc "$0/proc"
mount --rbind /sys "$0/sys"
mount --rbind /dev "$0/dev"
exec chroot --userspec="$1" "$0" /usr/bin/env -C "$2" "${@:3}"
"""


def why_not() -> str | None:
    """Return why an image cannot be built and run here; None if it can."""
    if BUILDAH is None:
        return "no buildah; apt-get install buildah"
    if os.geteuid() != 0:
        return "only root may build and mount images here"
    return None if BASE else "no base image: set TANDEM_TEST_BASE_IMAGE to one that can be pulled"


def buildah(*arguments: str | Path) -> str:
    command = [str(BUILDAH), *map(str, arguments)]
    return subprocess.run(
        command, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


@dataclass(frozen=True)
class Image:
    root: Path
    config: Mapping[str, Any]

    def command(self, *arguments: str) -> list[str]:
        """Return the image's own command with further arguments; only /tmp can be written to."""
        words = [*self.config["Entrypoint"], *self.config["Cmd"], *arguments]
        return self.running("-i", *self.config["Env"], *words)

    def running(self, *words: str) -> list[str]:
        """Return a command of the image, run in the image's folder as its user."""
        user, folder = str(self.config["User"]), str(self.config["WorkingDir"])
        script = ("bash", "-euc", READ_ONLY, str(self.root), user, folder)
        return ["unshare", "--mount", *script, *words]


@contextmanager
def built_image(name: str) -> Iterator[Image]:
    """Build the image as the file's first lines say; its files are gone afterwards."""
    volume = (f"--volume={CERTIFICATES}:{CERTIFICATES}:ro",) if Path(CERTIFICATES).exists() else ()
    dockerfile = ROOT / "configs" / "docker" / "Dockerfile"
    # docker: OCI's format has no HEALTHCHECK. --layers: what did not change is not built again.
    options = ("--format=docker", "--layers", f"--build-arg=BASE={BASE}", *volume)
    buildah("bud", *options, "-f", dockerfile, "-t", name, ROOT)
    container = buildah("from", name)
    try:
        config = json.loads(buildah("inspect", "--type=image", name))["Docker"]["config"]
        yield Image(Path(buildah("mount", container)), config)
    finally:
        buildah("rm", container)
