"""The folders of an account that may have no home."""

from pathlib import Path

import pytest
from platformdirs import user_cache_path

from models.errors import TandemError
from models.user_folders import needed_folder, user_folder


def none(_: str) -> Path:
    raise RuntimeError("could not determine the home directory")


def test_a_folder_below_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder(user_cache_path, "a", "b") == tmp_path / "tandem" / "a" / "b"


def test_without_a_home_there_is_none():
    assert user_folder(none, "a") is None
    assert user_folder(lambda name: Path("~/.cache", name)) is None
    with pytest.raises(TandemError, match="no home folder; set HOME"):
        needed_folder(none)
