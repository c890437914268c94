"""Files and folders that a configuration names: absolute, and those that can be written to.

Ray's processes work in another folder than the command, so what a user names relatively is made
absolute. Nor has every account a home that can be written to: a container's root may be read-only.
"""

import os
from pathlib import Path
from typing import Any

from app.environment import REGIONS_FOLDER, set_environment
from app.launch.config import ServeConfig
from app.launch.http_options import SSL_FILES

WITHOUT = {
    "compile_cache": "networks are compiled at each start",
    "trace_dir": "no traces are kept for tandem trace",
}


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Return the configuration with the paths that it names made absolute."""
    settings = config.settings
    paths: dict[str, Any] = {
        name: str(path.absolute())
        for name in (*WITHOUT, "api_keys_file")
        if (path := getattr(settings, name)) is not None and name in settings.model_fields_set
    }
    if settings.model_dirs:
        paths["model_dirs"] = [str(folder.absolute()) for folder in settings.model_dirs]
    if "/" in settings.model_set:  # a folder, no name
        paths["model_set"] = str(Path(settings.model_set).expanduser().absolute())
    files = {name: file for name in SSL_FILES if (file := getattr(config.http, name))}
    return config.with_arguments(**paths).with_http_options(
        **{name: str(Path(file).absolute()) for name, file in files.items()}
    )


def without_unwritable(config: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """Leave out what cannot be written, and say for each what is missed; serving needs neither."""
    lost = {name: reason for name in WITHOUT if (reason := _why_not(config, name)) is not None}
    warnings = [f"{name}: {reason}: {WITHOUT[name]}" for name, reason in lost.items()]
    return config.with_arguments(**dict.fromkeys(lost)), warnings


def _why_not(config: ServeConfig, name: str) -> str | None:
    """Return why a setting's folder cannot be written; None if it can, or none is wanted."""
    folder: Path | None = getattr(config.settings, name)
    if name == "trace_dir" and not config.has_tracing:
        return None
    if folder is None:
        is_asked = name in config.settings.model_fields_set
        return None if is_asked else "this account has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write to {folder} ({error.strerror})"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to {folder}"


def make_regions_folder(config: ServeConfig, run_dir: Path) -> None:
    """Make the folder that all Gateways of this run share, and tell them by the environment.

    It is in the run's own folder, which only this user enters and which goes with the run. Must be
    called before Ray starts.
    """
    if config.settings.shared_memory:
        folder = run_dir / "regions"
        folder.mkdir(mode=0o700)
        set_environment({REGIONS_FOLDER: str(folder)}, ours=(REGIONS_FOLDER,))
