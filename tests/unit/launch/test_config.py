"""serve_config.yaml read and overridden, and what it says of the service."""

from pathlib import Path
from typing import Any

import pytest

from app.errors import ConfigError
from app.launch.config import ADD_SERVICER, ServeConfig, default_config
from tests.support.configurations import APPLICATION, GOOD, with_key, write


def test_a_good_file_is_returned_as_it_is(tmp_path):
    assert ServeConfig.read(write(tmp_path, GOOD)).as_dict() == GOOD


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a: [1", "is not YAML"),
        (b"a:\n\t- b", "is not YAML"),
        (b"", "is empty or not a mapping"),
        (b"- a\n- b", "is empty or not a mapping"),
        (b"\xff\xd8\xff\xe0 a photo", "is not YAML"),
        (b"!!python/object:os.system x", "is not YAML"),
        (b"applications: []\napplications: []", "the key 'applications' stands twice"),
    ],
)
def test_what_is_no_configuration(tmp_path, data, says):
    path = tmp_path / "c.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        ServeConfig.read(path)


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path, name):
    with pytest.raises(ConfigError, match=r"cannot read .*; give --config FILE"):
        ServeConfig.read(tmp_path / name)


def test_the_command_line_wins_over_the_file_and_leaves_it_alone():
    given = ServeConfig.of(GOOD)
    config = given.with_overrides(model_set="other", host="0.0.0.0", port=9000)
    assert given == ServeConfig.of(GOOD)
    assert (config.settings.model_set, config.http.host, config.http.port) == (
        "other",
        "0.0.0.0",
        9000,
    )
    changed = config.as_dict()
    assert changed["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert changed["applications"][0]["args"] == {"model_set": "other"}
    assert changed["applications"][0]["deployments"] == APPLICATION["deployments"]


@pytest.mark.parametrize("text", ["a,b", "a, b", " a ,b "])
def test_sets_of_the_command_line(text):
    assert ServeConfig.of(GOOD).with_overrides(model_set=text).settings.model_sets == ("a", "b")


@pytest.mark.parametrize("text", ["a,", ",a", "a,,b", ","])
def test_an_empty_name_of_a_set_is_refused(text):
    with pytest.raises(ConfigError, match=r"--model-set '.*' has an empty name; separate"):
        ServeConfig.of(GOOD).with_overrides(model_set=text)


def test_a_folder_with_a_comma_is_one_set(tmp_path):
    folder = tmp_path / "a, b"
    folder.mkdir()
    settings = ServeConfig.of(GOOD).with_overrides(model_set=str(folder)).settings
    assert (settings.model_set, settings.has_several_sets) == (str(folder), False)


def test_without_wishes_the_file_stands_on_loopback():
    on_loopback = {"host": "127.0.0.1", "port": 8000}
    options: dict[str, Any]
    for options in ({}, {"http_options": {}}, {"http_options": {"port": 8000}}):
        config = ServeConfig.of({"applications": [APPLICATION]} | options)
        assert config.with_overrides() == config
        assert config.content["http_options"] == on_loopback
        assert config.url == "http://127.0.0.1:8000"
        assert config.http.is_on_loopback


def test_other_arguments_stay_when_the_set_is_overridden():
    content = with_key(GOOD, ("applications", 0, "args"), "max_files", 3)
    config = ServeConfig.of(content).with_overrides(model_set="other")
    assert config.content["applications"][0]["args"] == {"model_set": "other", "max_files": 3}


def test_a_configuration_without_applications():
    content: dict[str, Any]
    for content in ({}, {"applications": []}):
        with pytest.raises(ConfigError, match="no applications"):
            ServeConfig.of(content)


def test_changed_copies_leave_a_configuration_as_it_is():
    config = ServeConfig.of(GOOD)
    config.as_dict()["applications"][0]["args"]["model_set"] = "other"
    assert config.as_dict() == GOOD


def test_without_tls_no_option_of_it_is_left():
    tls = {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ca_certs": "roots.pem"}
    http = {"host": "127.0.0.1", "port": 8000, **tls}
    config = ServeConfig.of(with_key(GOOD, (), "http_options", http))
    assert config.url == "https://127.0.0.1:8000"
    assert config.without_tls().as_dict() == GOOD
    assert config.without_tls().url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(("prefix", "path"), [("/", ""), ("/images", "/images")])
def test_the_application_is_where_its_route_is(prefix, path):
    content = with_key(GOOD, ("applications", 0), "route_prefix", prefix)
    assert ServeConfig.of(content).url == f"http://127.0.0.1:8000{path}"


def test_all_interfaces_are_reached_on_loopback():
    config = ServeConfig.of(GOOD).with_overrides(host="0.0.0.0", port=9000)
    assert config.url == "http://127.0.0.1:9000"
    assert not config.http.is_on_loopback


def test_a_folder_that_cannot_be_entered_has_no_file(monkeypatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # what it does there
    assert default_config().name == "serve_config.yaml"


def test_arguments_that_do_not_go_together_are_a_line():
    config = ServeConfig.of(
        {"applications": [{"import_path": "app.main:build", "args": {"weights": {"a": 1.0}}}]}
    )
    with pytest.raises(ConfigError, match=r"^args: \w"):
        config.with_overrides(model_set="a,b")


@pytest.mark.parametrize(
    "options",
    [
        {"http_options": {"port": 0}},
        {"grpc_options": {"port": 0, "grpc_servicer_functions": [ADD_SERVICER]}},
    ],
)
def test_a_port_that_is_none(options):
    with pytest.raises(ConfigError, match=r"_options\.port is \d+: give 1 to 65535"):
        ServeConfig.of(options | {"applications": [{"import_path": "app.main:build"}]})


def test_log_options_may_be_empty():
    application = {"import_path": "app.main:build"}
    config = ServeConfig.of({"applications": [application], "logging_config": None})
    assert config.with_json_log().content["logging_config"] == {"encoding": "JSON"}
