"""Paths in a configuration: makes them absolute, and drops folders that cannot be written to.

Ray's processes run in another working folder than the command, so relative paths are made absolute.
Some accounts have no writable home: a container's root may be read-only.
"""

import os
from pathlib import Path
from typing import Any

from app.environment import REGIONS_FOLDER, set_environment
from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.http_options import SSL_FILES
from models.stores import is_url
from models.user_folders import with_home

WITHOUT = {"compile_cache": "networks are compiled at each start"}


def with_absolute_paths(config: ServeConfig) -> ServeConfig:
    """Return the configuration with absolute paths."""
    settings = config.settings
    paths: dict[str, Any] = {
        name: absolute(path)
        for name in (*WITHOUT, "api_keys_file")
        if (path := getattr(settings, name)) is not None and name in settings.model_fields_set
    }
    if settings.sample_dir is not None and not is_url(settings.sample_dir):
        paths["sample_dir"] = absolute(settings.sample_dir)
    if settings.model_dirs:
        paths["model_dirs"] = list(map(absolute, settings.model_dirs))
    if settings.traffic is not None:
        paths["traffic"] = {_absolute_set(name): of for name, of in settings.traffic.items()}
    if settings.shadow is not None:
        paths["shadow"] = _absolute_set(settings.shadow)
    if settings.model_sets is not None:
        paths["model_sets"] = list(map(_absolute_set, settings.model_sets))
    elif "/" in settings.model_set:
        paths["model_set"] = _absolute_set(settings.model_set)
    files = {name: file for name in SSL_FILES if (file := getattr(config.http, name))}
    return config.with_arguments(**paths).with_http_options(
        **{name: absolute(file) for name, file in files.items()}
    )


def _absolute_set(name: str) -> str:
    """Return a set's folder as an absolute path; a name or a store's URL stays unchanged."""
    is_folder = "/" in name and not is_url(name)
    return absolute(name) if is_folder else name


def absolute(path: str | Path) -> str:
    """Return the absolute path; ``~`` is a home folder, or stays if there is none."""
    try:
        return str(with_home(path).absolute())
    except FileNotFoundError as error:
        text = f"{path} is relative to a working folder that is gone; give an absolute path"
        raise ConfigError(text) from error


def without_unwritable(config: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """Remove folders that cannot be written to; return the configuration and a warning for each."""
    lost = {name: reason for name in WITHOUT if (reason := _why_not(config, name)) is not None}
    warnings = [f"{name}: {reason}: {WITHOUT[name]}" for name, reason in lost.items()]
    return config.with_arguments(**dict.fromkeys(lost)), warnings


def _why_not(config: ServeConfig, name: str) -> str | None:
    """Return why a setting's folder cannot be written to; None if it can, or is not set."""
    folder: Path | None = getattr(config.settings, name)
    if folder is None:
        is_asked = name in config.settings.model_fields_set
        return None if is_asked else "this account has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot write to {folder} ({error.strerror})"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"cannot write to {folder}"


def make_regions_folder(config: ServeConfig, run_dir: Path) -> None:
    """Make the folder of shared-memory regions for all Gateways, and name it in the environment.

    It is in the run's folder, which only this user can enter and which is removed after the run.
    Call this before Ray starts.
    """
    if config.settings.shared_memory:
        folder = run_dir / "regions"
        folder.mkdir(mode=0o700)
        set_environment({REGIONS_FOLDER: str(folder)}, ours=(REGIONS_FOLDER,))
