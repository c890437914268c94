"""A configuration's deployments are fitted to the members of the model set."""

import pytest

from app.errors import ConfigError
from app.launch.application_check import check_capacity
from app.launch.config import ServeConfig
from models.manifest import Manifest, read_manifest
from models.model_set import BUNDLED_DIR
from tests.support.configurations import ROOT, deployment_of
from tests.support.tiny_networks import write_tiny_set


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
        application["autoscaling_policy"]["policy_function"]
        == "app.scaling.serve_policy:EnsemblePolicy"
    )
    for deployment in application["deployments"]:
        scaling = deployment["autoscaling_config"]
        assert scaling["upscale_delay_s"] == scaling["downscale_delay_s"] == 0
        assert scaling["metrics_interval_s"] < scaling["look_back_period_s"]
