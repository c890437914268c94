"""Shared memory at a start: refused where callers may be elsewhere, and its folder of entries."""

from pathlib import Path

from app.environment import REGIONS_FOLDER, set_environment
from app.errors import ConfigError
from app.launch.config import ServeConfig


def check_shared_memory(config: ServeConfig, *, is_joining: bool) -> None:
    """Raise :class:`ConfigError` if it is on, and callers need not be on this machine.

    A Gateway behind HAProxy sees HAProxy's address alone, for both protocols: what is known of
    callers is known by where HAProxy listens.
    """
    if not config.settings.shared_memory:
        return
    if is_joining:
        raise ConfigError(
            "shared_memory: true with --address: a cluster's Gateways do not know on which machine "
            "a caller is; leave the setting out, or serve without --address"
        )
    if not config.http.is_on_loopback:
        raise ConfigError(
            f"shared_memory: true, and the service listens on {config.http.host}: callers of other "
            "machines have no memory in common with it; use --host 127.0.0.1, or leave the setting "
            "out"
        )


def make_regions_folder(config: ServeConfig, run_dir: Path) -> None:
    """Make the folder that all Gateways of this run share, and tell them by the environment.

    It is in the run's own folder, which only this user enters and which goes with the run. Must be
    called before Ray starts.
    """
    if config.settings.shared_memory:
        folder = run_dir / "regions"
        folder.mkdir(mode=0o700)
        set_environment({REGIONS_FOLDER: str(folder)}, ours=(REGIONS_FOLDER,))
