"""A configuration: read, refused, changed, fitted to a set; the shipped files differ as listed."""

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.schema import DeploymentSchema

from app.errors import ConfigError
from app.launch.checks import SERVE_DEFAULT_GRACE_S, SSL_OPTIONS, check_capacity
from app.launch.config import ADD_SERVICER, MOVED, ServeConfig, default_config
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR
from tests.support.cases import cases
from tests.support.configurations import (
    APPLICATION,
    GOOD,
    ROOT,
    SHIPPED,
    deployment_of,
    with_key,
    write,
)
from tests.support.tiny_networks import write_tiny_set


@cases(
    "data, says",
    (b"a: [1", "is not YAML"),
    (b"a:\n\t- b", "is not YAML"),
    (b"", "is empty or not a mapping"),
    (b"- a\n- b", "is empty or not a mapping"),
    (b"\xff\xd8\xff\xe0 a photo", "is not YAML"),
    (b"!!python/object:os.system x", "is not YAML"),
    (b"applications: []\napplications: []", "the key 'applications' stands twice"),
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
    content = with_key(GOOD, ARGS, "max_files", 3)
    given = ServeConfig.of(content)
    config = given.changed(http={"host": "0.0.0.0", "port": 9000}, model_set="other")
    given.as_dict()["applications"][0]["args"]["model_set"] = "other"  # of a copy
    assert given.as_dict() == content
    http = config.http
    assert (config.settings.model_set, http.host, http.port) == ("other", "0.0.0.0", 9000)
    assert config.url == "http://127.0.0.1:9000"
    assert not http.is_on_loopback
    changed = config.as_dict()
    assert changed["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert changed["applications"][0]["args"] == {"model_set": "other", "max_files": 3}
    assert changed["applications"][0]["deployments"] == APPLICATION["deployments"]


@pytest.mark.parametrize("options", [{}, {"http_options": {}}, {"http_options": {"port": 8000}}])
def test_without_wishes_the_file_stands_on_loopback(options):
    config = ServeConfig.of({"applications": [APPLICATION]} | options)
    assert config.changed() == config
    assert config.content["http_options"] == {"host": "127.0.0.1", "port": 8000}
    assert config.url == "http://127.0.0.1:8000"
    assert config.http.is_on_loopback


@pytest.mark.parametrize("content", [{}, {"applications": []}, {"applications": None}])
def test_a_configuration_without_applications(content):
    with pytest.raises(ConfigError, match="no applications"):
        ServeConfig.of(content)


def test_without_tls_no_option_of_it_is_left():
    tls = {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ca_certs": "roots.pem"}
    http = {"host": "127.0.0.1", "port": 8000, **tls}
    config = ServeConfig.of(with_key(GOOD, (), "http_options", http))
    assert config.url == "https://127.0.0.1:8000"
    plain = config.changed(http=dict.fromkeys(SSL_OPTIONS))
    assert (plain.as_dict(), plain.url) == (GOOD, "http://127.0.0.1:8000")


@pytest.mark.parametrize(("prefix", "path"), [("/", ""), ("/images", "/images")])
def test_the_application_is_where_its_route_is(prefix, path):
    content = with_key(GOOD, OURS, "route_prefix", prefix)
    assert ServeConfig.of(content).url == f"http://127.0.0.1:8000{path}"


def test_a_folder_that_cannot_be_entered_has_no_file(monkeypatch):
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # what it does there
    assert default_config().name == "serve_config.yaml"


def test_arguments_that_do_not_go_together_are_a_line():
    with pytest.raises(ConfigError, match=r"^args: \w"):
        ours(args={"weights": {"a": 1.0}}).changed(model_sets=["a", "b"])


@pytest.mark.parametrize(
    ("options", "more"),
    [("http_options", {}), ("grpc_options", {"grpc_servicer_functions": [ADD_SERVICER]})],
)
def test_a_port_that_is_none(options, more):
    with pytest.raises(ConfigError, match=rf"^{options}\.port is 0: give 1 to 65535"):
        ServeConfig.of(GOOD | {options: {"port": 0, **more}})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_shipped_configuration_is_clean_and_waits_for_its_requests(path):
    config = ServeConfig.read(path)
    assert config.content["applications"]
    for deployment in config.deployments:
        grace_s = deployment.get("graceful_shutdown_timeout_s", SERVE_DEFAULT_GRACE_S)
        # Serve lets a replica have new requests for another second.
        assert grace_s >= config.settings.request_timeout_s + 1, deployment["name"]


OURS, ARGS = ("applications", 0), ("applications", 0, "args")
DEPLOYMENT = (*OURS, "deployments", 0)
SCALING, POLICY = (*DEPLOYMENT, "autoscaling_config"), "autoscaling_policy"


def ours(**options: object) -> ServeConfig:
    """Return a configuration of our application alone, with these of its options."""
    return ServeConfig.of({"applications": [{"import_path": "app.main:build", **options}]})


def test_every_misspelt_key_is_named_at_once(tmp_path):
    content = with_key(with_key(GOOD, (), "zzz", 1), ("http_options",), "hots", "x")
    with pytest.raises(ConfigError, match=r"hots is no option; did you mean host\?.*zzz is no"):
        ServeConfig.read(write(tmp_path, content))


@pytest.mark.parametrize(
    ("place", "key", "value", "option", "old", "new"),
    [
        (
            (), "tracing_config", {"enabled": True}, "exporter_import_path",
            "app.tracing.pipeline:span_processors", "app.telemetry.export:span_processors",
        ),
        (
            OURS, POLICY, {"policy_kwargs": {"drain_s": 3}}, "policy_function",
            "app.scaling.serve_policy:EnsemblePolicy", "app.serve.scaling:EnsemblePolicy",
        ),
    ],
)  # fmt: skip
def test_an_import_path_of_an_earlier_version_is_refused_with_todays(
    tmp_path, place, key, value, option, old, new
):
    path = write(tmp_path, with_key(GOOD, place, key, value | {option: old}))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    prefix = "applications[0]." if place else ""
    says = f"{prefix}{key}.{option} is {old}, which has moved: write {new}"
    assert caught.value.message == f"{path}: {says}"


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_import_path_that_moved_is_gone_and_the_new_one_is_there(old, new):
    module, _, name = new.partition(":")
    assert hasattr(importlib.import_module(module), name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(old.partition(":")[0])


@cases(
    "graceful_s, request_s, name, says",
    (5, 10, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 5, .* of 10 s:"),
    (9.5, 10, "resnet50", "resnet50 has a graceful_shutdown_timeout_s of 9.5, .* of 10 s:"),
    (0, 1, "Gateway", "Gateway has a graceful_shutdown_timeout_s of 0, .* of 1 s:"),
    (None, 30, "Gateway", r"of 20 \(Serve's default\), .* of 30 s:"),
    (60, 30, "resnet50", r"Gateway has a .* of 20 \(Serve's default\), .* of 30 s:"),
    *((*times, "Gateway", None) for times in ((10, 10), (12, 10), (None, 20), (5, 4))),
)
def test_an_update_must_not_cut_answers_that_are_in_time(
    tmp_path, graceful_s, request_s, name, says
):
    grace = {} if graceful_s is None else {"graceful_shutdown_timeout_s": graceful_s}
    content = with_key(GOOD, OURS, "deployments", [{"name": name, **grace}])
    path = write(tmp_path, with_key(content, ARGS, "request_timeout_s", request_s))
    with nullcontext() if says is None else pytest.raises(ConfigError, match=f"{path}.*{says}"):
        ServeConfig.read(path)


def test_what_serve_waits_without_the_option():
    deployment = serve.deployment(name="x")(type("X", (), {}))
    assert deployment._deployment_config.graceful_shutdown_timeout_s == SERVE_DEFAULT_GRACE_S


OTHER = {"name": "other", "route_prefix": "/other", "import_path": "their.module:app"}
HUBS = {
    "Feedback": {"feedback": True},
    "Samples": {"teach": True, "teach_dir": "taught"},
    "Traffic": {"traffic": {"imagenette": 100}},
    "Sets": {"model_sets": ["imagenette", "other"]},
}


def test_numbers_that_are_text_are_numbers_from_then_on(tmp_path):
    numbers = {
        "graceful_shutdown_timeout_s": 12.0,
        "max_ongoing_requests": 512,
        "ray_actor_options": {"num_cpus": 0.5},
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
    }
    texts: dict[str, Any] = {
        key: {k: str(v) for k, v in value.items()} if isinstance(value, dict) else f"{value:g}"
        for key, value in numbers.items()
    }
    content = with_key(GOOD, OURS, "deployments", [GATEWAY | texts])
    config = ServeConfig.read(write(tmp_path, with_key(content, ("http_options",), "port", "8100")))
    assert config.http.port == 8100
    assert deployment_of(config, "Gateway") == GATEWAY | numbers


def test_another_application_has_arguments_of_its_own(tmp_path):
    """Wherever ours stands in the file."""
    other = OTHER | {"args": {"port": 1}, "deployments": [{"name": "Gateway"}]}
    content = GOOD | {"applications": [other, *GOOD["applications"]]}
    config = ServeConfig.read(write(tmp_path, content))
    assert (config.name, config.url) == ("tandem", "http://127.0.0.1:8000")
    changed = config.changed(max_files=3).as_dict()["applications"]
    assert changed[0] == other
    assert changed[1]["args"] == {"model_set": "imagenette", "max_files": 3}


GATEWAY = {"name": "Gateway"}
OUR_POLICY = {"policy_function": "app.serve.scaling:EnsemblePolicy"}


@pytest.mark.parametrize(
    ("place", "key", "value", "says"),
    [
        ((), "aplications", 1, "aplications is no option; did you mean applications?"),
        (("http_options",), "prot", 1, "http_options.prot is no option; did you mean port?"),
        (OURS, "import_pth", 1, "applications[0].import_pth is no option; did you mean import_pa"),
        (DEPLOYMENT, "max_ongoing_request", 1,
         "applications[0].deployments[0].max_ongoing_request is no option; "
         "did you mean max_ongoing_requests?"),
        (SCALING, "max_replica", 1,
         "applications[0].deployments[0].autoscaling_config.max_replica is no option; "
         "did you mean max_replicas?"),
        (ARGS, "modelset", "x", "modelset: Extra inputs"),
        (ARGS, "max_files", 0, "max_files: Input should be greater than or equal to 1"),
        (OURS, "args", None, "args"),
        (("http_options",), "port", "eighty", "port"),
        (DEPLOYMENT, "max_ongoing_requests", "many", "max_ongoing_requests"),
        (OURS, POLICY, OUR_POLICY | {"policy_kwarg": {}}, "no option; did you mean policy_kwargs?"),
        (OURS, POLICY, OUR_POLICY | {"policy_kwargs": {"drains_s": 3}}, "did you mean drain_s?"),
        (OURS, POLICY, OUR_POLICY | {"policy_kwargs": {"target_utilization": 7}},
         "less than or equal to 1"),
        ((), "proxy_location", "Disabled", "nobody would listen for clients; take EveryNode"),
        ((), "applications", [OTHER], "no application has import_path: app.main:build"),
        (("http_options",), "request_timeout_s", 10, "http_options.request_timeout_s is 10, and"),
        ((), "grpc_options", {"request_timeout_s": 3}, "grpc_options.request_timeout_s is 3, and"),
        (OURS, "deployments", [GATEWAY, GATEWAY], "deployments has Gateway twice"),
        (OURS, "deployments", [GATEWAY, None], "deployments[1] is no mapping"),
        ((), "applications", ["app.main:build"], "applications[0] is no mapping"),
        (OURS, "route_prefix", "images", "ends with none: '/images'"),
        (OURS, "route_prefix", "/images/", "ends with none: '/images'"),
        (OURS, "route_prefix", "/{x}", "has no place in a path"),
        (OURS, "route_prefix", None, "route_prefix: null"),
        (DEPLOYMENT, "max_ongoing_requests", 127, "args.max_concurrent_requests is 128"),
        (DEPLOYMENT, "user_config", {"max_batchsize": 4},
         "Gateway: user_config.max_batchsize: Extra inputs are not permitted; it has max_batch_"),
        (DEPLOYMENT, "user_config", {"max_batch_size": 0}, "greater than or equal to 1"),
        (DEPLOYMENT, "user_config", {"max_queued_images": 3}, "a form may fill"),
        *((OURS, "deployments", [{"name": name, "user_config": {"max_batch_size": 4}}],
           f"{name} takes no user_config") for name in ("Decoder", *HUBS)),
        (SCALING, "max_replicas", 0, "max_replicas"),
    ],
)  # fmt: skip
def test_what_serve_would_take_in_silence_and_the_service_stumble_over(
    tmp_path, place, key, value, says
):
    path = write(tmp_path, with_key(GOOD, place, key, value))
    with pytest.raises(ConfigError) as caught:
        ServeConfig.read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert says in caught.value.message


@cases(
    "place, key, value",
    ((), "http_options", GOOD["http_options"]),  # as it is
    ((), "proxy_location", "HeadOnly"),
    (("http_options",), "request_timeout_s", 60),
    (OURS, "route_prefix", "/a/b"),
    (OURS, POLICY, {"policy_function": "their.module:Policy", "policy_kwargs": {"x": 1}}),
    (DEPLOYMENT, "max_ongoing_requests", 128),
    (DEPLOYMENT, "user_config", {"max_batch_size": 4}),
)
def test_what_is_well(tmp_path, place, key, value):
    content = with_key(GOOD, place, key, value)
    assert ServeConfig.read(write(tmp_path, content)).as_dict() == content


STAGES = ("Decoder", "resnet50", "densenet169")  # that serve_config.yaml has in the Gateway
# Serve's own 25 % elsewhere: a second whole set of replicas would not find the CPUs. Ray 2.59 has
# no such option, and it is left out there.
SURGE = {"Gateway.max_surge_percent"} & {f"Gateway.{k}" for k in DeploymentSchema.model_fields}
OF_ALL = SURGE | {"tracing_config.sampling_ratio"}  # of every hundredth request
XEON = OF_ALL | {
    "args.streams", "args.batch_sizes", "args.decode_threads", "args.max_concurrent_requests",
    "Gateway.num_replicas", "Gateway.max_ongoing_requests", "Gateway.ray_actor_options",
}  # fmt: skip
CLUSTER = OF_ALL | {
    "http_options.host", "args.decode_threads", "application.autoscaling_policy",
    "Gateway.autoscaling_config", "Gateway.max_replicas_per_node",
    "Gateway.graceful_shutdown_timeout_s", "Gateway.health_check_period_s",
    "Gateway.health_check_timeout_s", "Gateway.ray_actor_options",
}  # fmt: skip
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
    parts = ("args", "deployments")
    flat = {f"application.{k}": v for k, v in application.items() if k not in parts}
    flat |= {f"args.{k}": v for k, v in application["args"].items()}
    for deployment in application["deployments"]:
        name = deployment["name"]
        own = {f"Gateway.{k}": v for k, v in deployment.items()}
        flat |= own if name == "Gateway" else {name: deployment}
    for key in content.keys() - {"applications"}:
        value = content[key]
        nested = isinstance(value, dict)
        flat |= {f"{key}.{k}": v for k, v in value.items()} if nested else {key: value}
    return flat


def test_nothing_else_differs_than_is_listed():
    ours = options(ServeConfig.read(ROOT / "serve_config.yaml").as_dict())
    absent, different = object(), {}
    for path in (ROOT / "configs").glob("*.yaml"):
        theirs = options(ServeConfig.read(path).as_dict())
        keys = ours.keys() | theirs.keys()
        changed = {k for k in keys if ours.get(k, absent) != theirs.get(k, absent)}
        different[path.name] = changed
    assert different == DIFFERENCES


def test_members_are_served_alike():
    """Every image visits both: they have the same options, so they grow alike."""
    for name in ("separate.yaml", "cluster.yaml"):
        content = options(ServeConfig.read(ROOT / "configs" / name).as_dict())
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


def test_stages_that_share_the_gateways_process_have_no_options_of_their_own(other_manifest):
    config = ServeConfig.read(SEPARATE).changed(members="gateway")
    assert names(config.fitted_to(other_manifest)) == ["Gateway", "Decoder"]
    assert names(config.changed(decoder="gateway").fitted_to(other_manifest)) == ["Gateway"]


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


APART_ARGS = {"decoder": "deployment", "members": "deployment"}


def test_members_without_any_options_are_left_to_serve(other_manifest):
    apart = ours(route_prefix="/", args=APART_ARGS, deployments=[{"name": "Decoder"}])
    assert names(apart.fitted_to(other_manifest)) == ["Decoder"]
    assert names(ours(route_prefix="/").fitted_to(other_manifest)) == []


def test_members_without_options_count_with_the_cpus_that_serve_gives_them(other_manifest):
    """Else Ray waited for them, and said nothing, where the machine has fewer."""
    config = ours(args=APART_ARGS, deployments=[{"name": "Decoder"}]).fitted_to(other_manifest)
    deployments = config.all_deployments(other_manifest)
    check_capacity(deployments, 5)
    said = r"5 CPUs \(Decoder 1, Gateway 1, first 1, second 1, third 1\), this machine has 4"
    with pytest.raises(ConfigError, match=f"asks for {said}"):
        check_capacity(deployments, 4)


@pytest.mark.parametrize("name", HUBS)
def test_what_all_gateways_share_keeps_its_options_while_it_is_used(name, other_manifest):
    """No member takes them over."""
    options = {"name": name, "ray_actor_options": {"num_cpus": 0.1}}
    for args, expected in ((APART_ARGS, []), (HUBS[name], [options])):
        config = ours(args=args, deployments=[options])
        assert config.fitted_to(other_manifest).deployments == expected


@cases(
    "options, cpus",
    ({"max_ongoing_requests": 9}, 1),
    ({"ray_actor_options": {"num_cpus": 1}}, 2),
    ({"ray_actor_options": {"memory": 1e6}}, 2),
)
def test_what_all_gateways_share_needs_no_cpu_unless_it_asks_for_one(options, cpus, other_manifest):
    """Their deployments have num_cpus of 0, which any options of the file's replace."""
    config = ours(args={"feedback": True}, deployments=[{"name": "Feedback", **options}])
    needed = config.all_deployments(other_manifest)
    check_capacity(needed, cpus)
    with pytest.raises(ConfigError, match=f"asks for {cpus} CPUs"):
        check_capacity(needed, cpus - 1)


def test_the_cluster_scales_by_our_policy_whatever_the_members(tmp_path):
    config = ServeConfig.read(ROOT / "configs" / "cluster.yaml")
    fitted = config.fitted_to(read_manifest(write_tiny_set(tmp_path / "tiny")))
    application = fitted.content["applications"][0]
    assert application[POLICY]["policy_function"] == OUR_POLICY["policy_function"]
    for deployment in application["deployments"]:
        scaling = deployment["autoscaling_config"]
        assert scaling["upscale_delay_s"] == scaling["downscale_delay_s"] == 0
        assert scaling["metrics_interval_s"] < scaling["look_back_period_s"]
