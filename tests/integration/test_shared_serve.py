"""A Serve that others use too: they stay as they are, while ours comes and goes."""

import httpx
import pytest
from ray import serve

from app.errors import ConfigError
from app.launch.config import ServeConfig
from app.launch.deploy import client_of, deployed_beside_others, wait_ready
from app.launch.ray_cluster import StopRequest
from app.launch.ray_features import serve_client, serve_details
from tests.support.cases import cases
from tests.support.services.deployed import own_application, replica_pids
from tests.support.tiny_networks import picture, write_tiny_set

STAGES = ("Gateway", "Decoder", "sure", "unsure")


@pytest.fixture
def imperative(served):
    """An application that somebody put there by ``serve.run``."""

    class Who:
        def __call__(self) -> str:
            return "me"

    deployment = serve.deployment(name="Who", ray_actor_options={"num_cpus": 0})(Who)
    serve.run(deployment.bind(), name="who", route_prefix="/who")
    yield "who"
    serve.delete("who")


def beside(folder, served, **changes):
    """Return a configuration of our own: another model set, in one process."""
    gateway = {"name": "Gateway", "ray_actor_options": {"num_cpus": 0.1}}
    tiny = write_tiny_set(folder / "other", name="other")
    own = own_application("beside", tiny, [gateway], batch_sizes=[1])
    http = served.config.as_dict()["http_options"]
    return ServeConfig.of({"http_options": http, "applications": [own | changes]})


def replicas() -> dict[str, set[int]]:
    return {stage: replica_pids(stage) for stage in STAGES}


@pytest.mark.slow  # make test starts and ends the service alone
def test_the_applications_of_others_stay_as_they_are(served, imperative, client, tmp_path):
    before, config = replicas(), beside(tmp_path, served).changed(http={"port": 1})
    with deployed_beside_others(config) as config, client_of(config.url) as asking:
        assert wait_ready(asking, StopRequest(), lambda _: None, 120, applications=["beside"])
        answer = httpx.post(f"{config.url}/v1/classify", content=picture("red"), timeout=60)
        assert answer.json()["model_set"] == "other"
        assert set(serve.status().applications) == {"tandem", imperative, "beside"}
        assert replicas() == before
    assert set(serve.status().applications) == {"tandem", imperative}
    assert replicas() == before
    assert client.post("/v1/classify", content=picture("red")).status_code == 200
    assert client.get("/who").text == "me"
    # What a controller that is started anew would apply.
    assert serve_details(serve_client(), 30)["applications"]["tandem"]["deployed_app_config"][
        "args"
    ] == dict(served.config.as_dict()["applications"][0]["args"])


@cases(
    "own, told",
    ({"name": "tandem"}, "'tandem' at /, which has the name of 'tandem' at /beside"),
    ({"route_prefix": "/"}, "'tandem' at /, which has the route of 'beside' at /"),
)
def test_an_application_in_the_place_of_anothers_is_refused(served, client, tmp_path, own, told):
    before = replicas()
    with (
        pytest.raises(ConfigError, match=told),
        deployed_beside_others(beside(tmp_path, served, **own)),
    ):
        pass
    assert set(serve.status().applications) == {"tandem"}
    assert replicas() == before
    assert client.post("/v1/classify", content=picture("red")).status_code == 200
