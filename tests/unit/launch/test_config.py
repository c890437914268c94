"""serve_config.yaml read strictly: what Serve would accept in silence is refused here."""

import copy
import re
from pathlib import Path

import pytest
import yaml
from ray import serve

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.config_check import SERVE_DEFAULT_GRACE_S
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR
from tests.support.tiny_networks import write_tiny_set

ROOT = Path(__file__).parents[3]
SHIPPED = [
    path
    for path in [ROOT / "serve_config.yaml", *sorted((ROOT / "configs").rglob("*.yaml"))]
    if "\n    import_path: app." in path.read_text("utf-8")
]
APPLICATION = {
    "name": "tandem",
    "import_path": "app.main:build",
    "args": {"model_set": "imagenette"},
    "deployments": [{"name": "Gateway", "autoscaling_config": {"min_replicas": 1}}],
}
GOOD = {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [APPLICATION]}


def write(folder: Path, content: object) -> Path:
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(content), "utf-8")
    return path


def with_key(content: dict, place: tuple, key: str, value: object) -> dict:
    changed = copy.deepcopy(content)
    target = changed
    for step in place:
        target = target[step]
    target[key] = value
    return changed


def test_there_is_something_to_check():
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_is_clean(path):
    assert ServeConfig.read(path).content["applications"]


def test_a_good_file_is_returned_as_it_is(tmp_path):
    assert ServeConfig.read(write(tmp_path, GOOD)).as_dict() == GOOD


DEPLOYMENT = ("applications", 0, "deployments", 0)


@pytest.mark.parametrize(
    ("place", "misspelt", "says"),
    [
        ((), "aplications", "aplications is no option; did you mean applications?"),
        (("http_options",), "prot", "http_options.prot is no option; did you mean port?"),
        (
            ("applications", 0),
            "import_pth",
            "applications[0].import_pth is no option; did you mean import_path?",
        ),
        (
            DEPLOYMENT,
            "max_ongoing_request",
            "applications[0].deployments[0].max_ongoing_request is no option; "
            "did you mean max_ongoing_requests?",
        ),
        (
            (*DEPLOYMENT, "autoscaling_config"),
            "max_replica",
            "applications[0].deployments[0].autoscaling_config.max_replica is no option; "
            "did you mean max_replicas?",
        ),
    ],
)
def test_a_misspelt_key_is_refused_with_a_suggestion(tmp_path, place, misspelt, says):
    path = write(tmp_path, with_key(GOOD, place, misspelt, 1))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    assert says in caught.value.message
    assert str(path) in caught.value.message


def test_every_misspelt_key_is_named_at_once(tmp_path):
    content = with_key(with_key(GOOD, (), "zzz", 1), ("http_options",), "hots", "x")
    with pytest.raises(ConfigError, match=r"hots is no option; did you mean host\?.*zzz is no"):
        ServeConfig.read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        (("applications", 0, "args"), "modelset", "x", "modelset: Extra inputs"),
        (("applications", 0, "args"), "max_files", 0, "max_files: .*greater than or equal to 1"),
        (("applications", 0), "args", None, "args"),
        (("http_options",), "port", "eighty", "port"),
        ((), "applications", None, "applications"),
        (DEPLOYMENT, "max_ongoing_requests", "many", "max_ongoing_requests"),
    ],
)
def test_a_bad_value_is_refused_with_its_place(tmp_path, place, key, value, says):
    with pytest.raises(ConfigError, match=says):
        ServeConfig.read(write(tmp_path, with_key(GOOD, place, key, value)))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a: [1", "is not YAML"),
        (b"a:\n\t- b", "is not YAML"),
        (b"", "is empty or not a mapping"),
        (b"- a\n- b", "is empty or not a mapping"),
        (b"\xff\xd8\xff\xe0 a photo", "is not YAML"),
        (b"!!python/object:os.system x", "is not YAML"),
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


def test_without_wishes_the_file_stands_on_loopback():
    on_loopback = {"host": "127.0.0.1", "port": 8000}
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
    for content in ({}, {"applications": []}):
        with pytest.raises(ConfigError, match="no applications"):
            ServeConfig.of(content)


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
    was = config.deployment("resnet50")
    for name in ("first", "second", "third"):
        assert {**deployments[name], "name": "resnet50"} == was
    assert ServeConfig.read(SEPARATE) == config  # the input was not written to


def test_members_without_any_options_are_left_to_serve(other_manifest):
    arguments = {"decoder": "deployment", "members": "deployment"}
    application = {"import_path": "app.main:build", "route_prefix": "/"}
    apart = application | {"args": arguments, "deployments": [{"name": "Decoder"}]}
    for bare, expected in ((apart, ["Decoder"]), (application, [])):
        config = ServeConfig.of({"applications": [bare]})
        assert names(config.fitted_to(other_manifest)) == expected


def test_stages_that_share_the_gateways_process_have_no_options_of_their_own(other_manifest):
    config = ServeConfig.read(SEPARATE).with_arguments(members="gateway")
    assert names(config.fitted_to(other_manifest)) == ["Gateway", "Decoder"]
    config = config.with_arguments(decoder="gateway")
    assert names(config.fitted_to(other_manifest)) == ["Gateway"]


POLICY = {"policy_function": "app.scaling.serve_policy:EnsemblePolicy"}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (POLICY | {"policy_kwarg": {}}, "no option; did you mean policy_kwargs?"),
        (POLICY | {"policy_kwargs": {"drains_s": 3}}, "did you mean drain_s?"),
        (POLICY | {"policy_kwargs": {"target_utilization": 7}}, "less than or equal to 1"),
    ],
)
def test_the_autoscaling_policy_is_read_as_strictly(tmp_path, policy, says):
    content = with_key(GOOD, ("applications", 0), "autoscaling_policy", policy)
    with pytest.raises(ConfigError, match=re.escape(says)):
        ServeConfig.read(write(tmp_path, content))


def test_a_policy_of_somebody_elses_has_its_own_kwargs(tmp_path):
    policy = {"policy_function": "their.module:Policy", "policy_kwargs": {"x": 1}}
    content = with_key(GOOD, ("applications", 0), "autoscaling_policy", policy)
    assert ServeConfig.read(write(tmp_path, content)).as_dict() == content


def test_the_cluster_scales_by_our_policy_whatever_the_members(tmp_path):
    config = ServeConfig.read(ROOT / "configs" / "cluster.yaml")
    fitted = config.fitted_to(read_manifest(write_tiny_set(tmp_path / "tiny")))
    application = fitted.content["applications"][0]
    assert application["autoscaling_policy"]["policy_function"] == POLICY["policy_function"]
    for deployment in application["deployments"]:
        scaling = deployment["autoscaling_config"]
        assert scaling["upscale_delay_s"] == scaling["downscale_delay_s"] == 0
        assert scaling["metrics_interval_s"] < scaling["look_back_period_s"]


def test_a_configuration_cannot_be_altered():
    config = ServeConfig.of(GOOD)
    with pytest.raises(TypeError, match="does not support item assignment"):
        config.content["applications"][0]["args"]["model_set"] = "other"
    with pytest.raises(AttributeError):
        config.content["applications"].append({})
    config.as_dict()["applications"][0]["args"]["model_set"] = "other"
    config.deployment("Gateway")["autoscaling_config"]["min_replicas"] = 7
    assert config.as_dict() == GOOD


def test_the_options_of_a_deployment_are_replaced_or_added():
    config = ServeConfig.of(GOOD)
    gateway, other = {"name": "Gateway", "num_replicas": 2}, {"name": "other"}
    assert config.deployment("other") == other
    changed = config.with_deployment(gateway).with_deployment(other)
    assert changed.as_dict()["applications"][0]["deployments"] == [gateway, other]
    assert config.as_dict() == GOOD


def test_without_tls_no_option_of_it_is_left():
    tls = {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ca_certs": "roots.pem"}
    config = ServeConfig.of(with_key(GOOD, (), "http_options", GOOD["http_options"] | tls))
    assert config.url == "https://127.0.0.1:8000"
    assert config.without_tls().as_dict() == GOOD
    assert config.without_tls().url == "http://127.0.0.1:8000"


@pytest.mark.parametrize(("prefix", "path"), [("/", ""), ("/images", "/images"), (None, "")])
def test_the_application_is_where_its_route_is(prefix, path):
    content = with_key(GOOD, ("applications", 0), "route_prefix", prefix)
    assert ServeConfig.of(content).url == f"http://127.0.0.1:8000{path}"


def test_all_interfaces_are_reached_on_loopback():
    config = ServeConfig.of(GOOD).with_overrides(host="0.0.0.0", port=9000)
    assert config.url == "http://127.0.0.1:9000"
    assert not config.http.is_on_loopback


def with_times(graceful_s: float | None, request_s: float, name: str = "Gateway") -> dict:
    options = {"name": name}
    if graceful_s is not None:
        options["graceful_shutdown_timeout_s"] = graceful_s
    application = APPLICATION | {"args": {"request_timeout_s": request_s}, "deployments": [options]}
    return GOOD | {"applications": [application]}


@pytest.mark.parametrize(
    ("graceful_s", "request_s", "name", "told"),
    [
        (5, 10, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 5, .* of 10 s:"),
        (9.5, 10, "resnet50", "resnet50 has a graceful_shutdown_timeout_s of 9.5, .* of 10 s:"),
        (0, 1, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 0, .* of 1 s:"),
        (None, 30, "Gateway", r"of 20 \(Serve's default\), .* of 30 s:"),
        (60, 30, "resnet50", r"Gateway has a .* of 20 \(Serve's default\), .* of 30 s:"),
    ],
)
def test_an_update_must_not_cut_answers_that_are_in_time(
    tmp_path, graceful_s, request_s, name, told
):
    path = write(tmp_path, with_times(graceful_s, request_s, name))
    with pytest.raises(ConfigError, match=told) as caught:
        ServeConfig.read(path)
    assert str(path) in caught.value.message


@pytest.mark.parametrize(("graceful_s", "request_s"), [(10, 10), (12, 10), (None, 20), (5, 4)])
def test_an_update_that_waits_long_enough(graceful_s, request_s):
    ServeConfig.of(with_times(graceful_s, request_s))


def test_what_serve_waits_without_the_option():
    deployment = serve.deployment(name="x")(type("X", (), {}))
    assert deployment._deployment_config.graceful_shutdown_timeout_s == SERVE_DEFAULT_GRACE_S


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_waits_for_its_requests(path):
    config = ServeConfig.read(path)
    for deployment in config.deployments:
        grace_s = deployment.get("graceful_shutdown_timeout_s", SERVE_DEFAULT_GRACE_S)
        # Serve lets a replica have new requests for another second.
        assert grace_s >= config.settings.request_timeout_s + 1, deployment["name"]
