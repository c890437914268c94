"""serve_config.yaml read and overridden, and what it says of the service.

The configurations for other places are serve_config.yaml but for what is listed here.

A configuration's deployments are fitted to the members of the model set.

Files and folders of a configuration: absolute, and written to only where they can be.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from ray.serve.schema import DeploymentSchema

from app.environment import REGIONS_FOLDER
from app.errors import ConfigError
from app.launch.checks import check_capacity
from app.launch.config import (
    ADD_SERVICER,
    ServeConfig,
    absolute,
    default_config,
    make_regions_folder,
    with_absolute_paths,
    without_unwritable,
)
from app.settings import Settings
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR
from tests.support.configurations import APPLICATION, GOOD, ROOT, deployment_of, with_key, write
from tests.support.tiny_networks import write_tiny_set


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


ROOT_DRIFT = Path(__file__).parents[3]
STAGES = ("Decoder", "resnet50", "densenet169")  # that serve_config.yaml has in the Gateway
# Serve's own 25 % elsewhere: a second whole set of replicas would not find the CPUs. Ray 2.59 has
# no such option, and it is left out there.
SURGE = {"Gateway.max_surge_percent"} & {f"Gateway.{k}" for k in DeploymentSchema.model_fields}
EVERY_HUNDREDTH = {"tracing_config.sampling_ratio"}
XEON = (
    EVERY_HUNDREDTH
    | SURGE
    | {
        "args.streams",
        "args.batch_sizes",
        "args.decode_threads",
        "args.max_concurrent_requests",
        "Gateway.num_replicas",
        "Gateway.max_ongoing_requests",
        "Gateway.ray_actor_options",
    }
)
CLUSTER = (
    EVERY_HUNDREDTH
    | SURGE
    | {
        "http_options.host",
        "args.decode_threads",
        "application.autoscaling_policy",
        "Gateway.autoscaling_config",
        "Gateway.max_replicas_per_node",
        "Gateway.graceful_shutdown_timeout_s",
        "Gateway.health_check_timeout_s",
        "Gateway.ray_actor_options",
    }
)
APART = {"args.batch_sizes", "args.decoder", "args.members", *STAGES}
DIFFERENCES = {
    "laptop.yaml": set(),
    "separate.yaml": APART | SURGE | {"Gateway.ray_actor_options"},
    "xeon-one-socket.yaml": XEON,
    "xeon-two-sockets.yaml": XEON,
    "cluster.yaml": APART | CLUSTER,
    "majority-vote.yaml": {"args.combine"},
    "mirroring.yaml": {"args.preprocess"},
    "cluster-whole.yaml": CLUSTER | {"args.streams", "args.batch_sizes"},
}


def options(content: dict[str, Any]) -> dict[str, Any]:
    """Return every option by its place; a stage beside the Gateway is one."""
    (application,) = content["applications"]
    flat = {
        f"application.{k}": v for k, v in application.items() if k not in ("args", "deployments")
    }
    flat |= {f"args.{k}": v for k, v in application["args"].items()}
    for deployment in application["deployments"]:
        name = deployment["name"]
        own = {f"Gateway.{k}": v for k, v in deployment.items()}
        flat |= own if name == "Gateway" else {name: deployment}
    for key, value in content.items():
        if key != "applications":
            flat |= (
                {f"{key}.{k}": v for k, v in value.items()}
                if isinstance(value, dict)
                else {key: value}
            )
    return flat


def test_every_configuration_is_listed():
    found = {path.name for path in (ROOT_DRIFT / "configs").glob("*.yaml")}
    assert found == set(DIFFERENCES)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_nothing_else_differs(name):
    ours, theirs = (
        options(ServeConfig.read(ROOT_DRIFT / path).as_dict())
        for path in ("serve_config.yaml", f"configs/{name}")
    )
    absent = object()
    different = {k for k in ours | theirs if ours.get(k, absent) != theirs.get(k, absent)}
    assert different == DIFFERENCES[name]


def test_members_are_served_alike():
    """Every image visits both: they have the same options, so they grow alike."""
    for name in ("separate.yaml", "cluster.yaml"):
        content = options(ServeConfig.read(ROOT_DRIFT / "configs" / name).as_dict())
        assert {**content["resnet50"], "name": ""} == {**content["densenet169"], "name": ""}


@pytest.fixture(scope="module")
def other_manifest(tmp_path_factory) -> Manifest:
    gains = {"first": 1.0, "second": 2.0, "third": 3.0}
    return read_manifest(write_tiny_set(tmp_path_factory.mktemp("set"), gains=gains))


SEPARATE = ROOT / "configs" / "separate.yaml"


def names(config: ServeConfig) -> list[str]:
    return [deployment["name"] for deployment in config.deployments]


def test_the_bundled_members_keep_their_options():
    config = ServeConfig.read(SEPARATE)
    manifest = read_manifest(BUNDLED_DIR / "imagenette")
    assert config.fitted_to(manifest) == config
    assert {m.name for m in manifest.members} <= set(names(config))


def test_other_members_take_over_the_options_of_those_that_are_not_there(other_manifest):
    config = ServeConfig.read(SEPARATE)
    fitted = config.fitted_to(other_manifest)
    stages = [n for n in names(config) if n[0].isupper()]
    assert names(fitted) == [*stages, "first", "second", "third"]
    deployments = {d["name"]: d for d in fitted.deployments}
    was = deployment_of(config, "resnet50")
    for name in ("first", "second", "third"):
        assert {**deployments[name], "name": "resnet50"} == was
    own = {id(deployments[name]["ray_actor_options"]) for name in ("first", "second", "third")}
    assert len(own) == 3  # a change of one member's is no other's
    assert ServeConfig.read(SEPARATE) == config  # the input was not written to


def test_members_without_any_options_are_left_to_serve(other_manifest):
    arguments = {"decoder": "deployment", "members": "deployment"}
    application = {"import_path": "app.main:build", "route_prefix": "/"}
    apart = application | {"args": arguments, "deployments": [{"name": "Decoder"}]}
    for bare, expected in ((apart, ["Decoder"]), (application, [])):
        config = ServeConfig.of({"applications": [bare]})
        assert names(config.fitted_to(other_manifest)) == expected


def test_members_without_options_count_with_the_cpus_that_serve_gives_them(other_manifest):
    """Else Ray waited for them, and said nothing, where the machine has fewer."""
    arguments = {"decoder": "deployment", "members": "deployment"}
    application = {"import_path": "app.main:build", "args": arguments}
    config = ServeConfig.of(
        {"applications": [application | {"deployments": [{"name": "Decoder"}]}]}
    )
    deployments = config.fitted_to(other_manifest).all_deployments(other_manifest)
    check_capacity(deployments, 5)
    said = (
        r"asks for 5 CPUs \(Decoder 1, Gateway 1, first 1, second 1, third 1\), this machine has 4"
    )
    with pytest.raises(ConfigError, match=said):
        check_capacity(deployments, 4)


def test_stages_that_share_the_gateways_process_have_no_options_of_their_own(other_manifest):
    config = ServeConfig.read(SEPARATE).with_arguments(members="gateway")
    assert names(config.fitted_to(other_manifest)) == ["Gateway", "Decoder"]
    config = config.with_arguments(decoder="gateway")
    assert names(config.fitted_to(other_manifest)) == ["Gateway"]


HUBS = {
    "Feedback": {"feedback": True},
    "Traffic": {"traffic": {"imagenette": 100}},
    "Sets": {"model_sets": ["imagenette", "other"]},
}


@pytest.mark.parametrize("name", HUBS)
def test_what_all_gateways_share_keeps_its_options_while_it_is_used(name, other_manifest):
    options = {"name": name, "ray_actor_options": {"num_cpus": 0.1}}
    application = {"import_path": "app.main:build", "deployments": [options]}
    for args, expected in (({"decoder": "deployment"}, []), (HUBS[name], [options])):
        config = ServeConfig.of({"applications": [application | {"args": args}]})
        assert config.fitted_to(other_manifest).deployments == expected


@pytest.mark.parametrize("name", HUBS)
def test_no_member_takes_over_the_options_of_what_is_none(name, other_manifest):
    args = {"decoder": "deployment", "members": "deployment"}
    application = {"import_path": "app.main:build", "args": args, "deployments": [{"name": name}]}
    config = ServeConfig.of({"applications": [application]})
    assert names(config.fitted_to(other_manifest)) == []


def test_what_all_gateways_share_needs_no_cpu_unless_it_asks_for_one(other_manifest):
    """Their deployments have num_cpus of 0, which any options of the file's replace."""
    for options, cpus in (
        ({"max_ongoing_requests": 9}, 1),
        ({"ray_actor_options": {"num_cpus": 1}}, 2),
        ({"ray_actor_options": {"memory": 1e6}}, 2),
    ):
        application = {"import_path": "app.main:build", "args": {"feedback": True}}
        deployments = [{"name": "Feedback", **options}]
        config = ServeConfig.of({"applications": [application | {"deployments": deployments}]})
        needed = config.all_deployments(other_manifest)
        check_capacity(needed, cpus)
        with pytest.raises(ConfigError, match=f"asks for {cpus} CPUs"):
            check_capacity(needed, cpus - 1)


@pytest.mark.parametrize("name", HUBS)
def test_what_all_gateways_share_takes_no_user_config(name):
    deployments = [{"name": name, "user_config": {"max_batch_size": 4}}]
    application = {"import_path": "app.main:build", "deployments": deployments}
    with pytest.raises(ConfigError, match=f"{name} takes no user_config"):
        ServeConfig.of({"applications": [application]})


def test_the_cluster_scales_by_our_policy_whatever_the_members(tmp_path):
    config = ServeConfig.read(ROOT / "configs" / "cluster.yaml")
    fitted = config.fitted_to(read_manifest(write_tiny_set(tmp_path / "tiny")))
    application = fitted.content["applications"][0]
    assert (
        application["autoscaling_policy"]["policy_function"] == "app.serve.scaling:EnsemblePolicy"
    )
    for deployment in application["deployments"]:
        scaling = deployment["autoscaling_config"]
        assert scaling["upscale_delay_s"] == scaling["downscale_delay_s"] == 0
        assert scaling["metrics_interval_s"] < scaling["look_back_period_s"]


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
