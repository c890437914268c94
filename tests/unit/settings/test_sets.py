"""Several sets in the settings: how they are named, what is refused, each set's share of limits."""

import pytest
from pydantic import ValidationError

from app.launch.config import ServeConfig
from app.settings import Settings


def refused(**given: object) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(given)
    return str(caught.value)


def test_the_first_set_is_the_default():
    settings = Settings(model_sets=("a", "b"))
    assert settings.model_set == "a"
    assert [own.model_set for own in settings.of_each_set()] == ["a", "b"]


@pytest.mark.parametrize("one", [Settings(), Settings(model_sets=("a",))])
def test_one_set_has_all_of_the_limits(one):
    assert one.of_each_set() == [one]


def test_limits_of_a_gateway_are_divided_evenly():
    settings = Settings(model_sets=("a", "b", "c"), max_concurrent_requests=10, cache_mib=2)
    for own in settings.of_each_set():
        assert (own.max_concurrent_requests, own.cache_mib) == (3, 1)
        assert own.max_bytes_in_flight == settings.max_bytes_in_flight // 3
    many = Settings(model_sets=("a", "b"), max_body_bytes=90, max_bytes_in_flight=100)
    assert [own.max_bytes_in_flight for own in many.of_each_set()] == [90, 90]


def test_what_says_twice_or_not_at_all_which_sets_are_served_is_refused():
    assert "leave one of them out" in refused(model_set="a", model_sets=["b"])
    assert "at least 1" in refused(model_sets=[])
    assert "tuple" in refused(model_sets="a")
    assert "weights names members of one set" in refused(model_sets=["a", "b"], weights={"m": 1})


@pytest.mark.parametrize("stage", ["decoder", "members", "combiner"])
def test_several_sets_are_served_in_one_process_alone(stage):
    assert f"2 sets and {stage} is deployment" in refused(
        model_sets=["a", "b"], **{stage: "deployment"}
    )
    assert Settings(model_sets=("a",), **{stage: "deployment"}).model_set == "a"


def test_one_way_of_naming_sets_takes_the_place_of_the_other():
    content = {"applications": [{"import_path": "app.main:build", "args": {"model_set": "a"}}]}
    several = ServeConfig.of(content).with_overrides(model_set="b,c")
    assert several.settings.model_sets == ("b", "c")
    again = several.with_arguments(max_files=3).with_overrides(model_set="d")
    assert again.content["applications"][0]["args"] == {"model_set": "d", "max_files": 3}


def test_a_set_that_is_loaded_later_has_the_share_of_one_more():
    settings = Settings(model_sets=("a", "b"), max_concurrent_requests=9, weights=None)
    own = settings.of_one_more("c")
    assert (own.model_set, own.max_concurrent_requests) == ("c", 3)
    assert own.has_several_sets
    alone = Settings(model_set="a", max_concurrent_requests=8, weights={"m": 2.0}).of_one_more("c")
    assert (alone.model_set, alone.max_concurrent_requests) == ("c", 4)
    assert alone.weights is None  # they are of the other set's members


@pytest.mark.parametrize("seconds", [0, -1, "soon"])
def test_sets_are_unloaded_after_a_positive_time(seconds):
    assert "unload_after_s" in refused(unload_after_s=seconds)


@pytest.mark.parametrize("weights", [{}, {"a": 0}, {"a": -1}, {"a": float("inf")}])
def test_weights_of_sets_are_positive_numbers(weights):
    assert "set_weights" in refused(set_weights=weights)
