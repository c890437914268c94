"""Files and folders of a configuration: absolute, and written to only where they can be."""

import os
from pathlib import Path
from typing import Any

from app.environment import REGIONS_FOLDER
from app.launch.config import ServeConfig
from app.launch.folders import (
    absolute,
    make_regions_folder,
    with_absolute_paths,
    without_unwritable,
)
from app.settings import Settings


def config(*, http: dict[str, Any] | None = None, **arguments: Any):
    return ServeConfig.of(
        {
            "http_options": http or {},
            "applications": [
                {"name": "tandem", "import_path": "app.main:build", "args": arguments}
            ],
        }
    )


def arguments_of(checked: ServeConfig) -> dict[str, Any]:
    return dict(checked.as_dict()["applications"][0]["args"])


def test_what_is_named_relatively_is_of_the_commands_folder(tmp_path, monkeypatch):
    """Ray's processes work in another one."""
    monkeypatch.chdir(tmp_path)
    paths: dict[str, Any] = {
        "compile_cache": "cache",
        "api_keys_file": "/etc/keys",
    }
    files = {"ssl_certfile": "tls.pem", "ssl_keyfile": "/etc/tls.key"}
    asked = config(http=files, model_set="./sets/a", model_dirs=["d"], **paths)
    checked = with_absolute_paths(asked)
    assert arguments_of(checked) == {
        "model_set": str(tmp_path / "sets" / "a"),
        "model_dirs": [str(tmp_path / "d")],
        "compile_cache": str(tmp_path / "cache"),
        "api_keys_file": "/etc/keys",
    }
    http = checked.http
    assert (http.ssl_certfile, http.ssl_keyfile) == (str(tmp_path / "tls.pem"), "/etc/tls.key")


def test_what_is_not_named_is_left_to_the_settings():
    asked = config(model_set="imagenette", compile_cache=None)
    assert arguments_of(with_absolute_paths(asked)) == arguments_of(asked)


def test_a_folder_that_cannot_be_written_is_left_out_with_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    lost = tmp_path / "file" / "below"
    checked, warnings = without_unwritable(config(compile_cache=str(lost)))
    assert checked.settings.compile_cache is None
    why = f"cannot write to {lost} (Not a directory)"
    assert warnings == [f"compile_cache: {why}: networks are compiled at each start"]


def test_one_that_can_is_made(tmp_path):
    asked = config(compile_cache=str(tmp_path / "a" / "b"))
    assert without_unwritable(asked) == (asked, [])
    assert (tmp_path / "a" / "b").is_dir()


def test_nothing_is_said_of_what_is_not_wanted():
    asked = config(compile_cache=None)
    assert without_unwritable(asked) == (asked, [])


def test_an_account_without_a_home_is_told_what_it_misses(monkeypatch, tmp_path):
    monkeypatch.setattr(Settings.model_fields["compile_cache"], "default", None)
    Settings.model_rebuild(force=True)
    try:
        _, warnings = without_unwritable(config())
    finally:
        monkeypatch.undo()
        Settings.model_rebuild(force=True)
    (warning,) = warnings
    assert warning.startswith("compile_cache: this account has no home folder: ")


def test_the_gateways_are_told_of_a_folder_that_only_this_user_enters(tmp_path, monkeypatch):
    monkeypatch.setenv(REGIONS_FOLDER, "another run's")
    make_regions_folder(config(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    make_regions_folder(config(shared_memory="unproxied"), tmp_path)
    folder = Path(os.environ[REGIONS_FOLDER])
    assert folder.parent == tmp_path
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_folders_of_several_sets_are_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = with_absolute_paths(config(model_sets=["imagenette", "./sets/a"]))
    assert made.settings.model_sets == ("imagenette", str(tmp_path / "sets" / "a"))


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("compile_cache", "api_keys_file", "sample_dir")
    paths: dict[str, Any] = {name: f"~/{name}" for name in names}
    paths |= {"model_dirs": ["~/sets"], "model_set": "~/set"}
    arguments = arguments_of(with_absolute_paths(config(**paths)))
    assert [arguments[name] for name in names] == [str(tmp_path / name) for name in names]
    assert arguments["model_dirs"] == [str(tmp_path / "sets")]
    assert arguments["model_set"] == str(tmp_path / "set")
    assert absolute("~nobody-of-this-name/x") == str(Path.cwd() / "~nobody-of-this-name" / "x")


def test_a_tilde_is_the_home_folder_for_whoever_reads_the_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = Settings.model_validate({"model_dirs": ["~/sets"], "compile_cache": "~/cache"})
    assert settings.model_dirs == (tmp_path / "sets",)
    assert settings.compile_cache == tmp_path / "cache"
