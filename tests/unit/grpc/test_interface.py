"""The interface's definition: the files made from it, its fields, its statuses, its times."""

import math
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from grpc_tools import protoc

import app.errors
from app import responses
from app.errors import BadParameterError
from app.grpc import tandem_pb2 as messages
from app.grpc.call import code_of, number_of
from app.grpc.request import announced_bytes, timeout_s_of
from app.grpc.servicer import add_servicer
from app.launch.config import ADD_SERVICER, grpc_port, with_grpc
from app.queueing.haproxy_headers import PREFIX_METADATA
from models import ensemble
from models.errors import TandemError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("tandem", ("python", "pyi", "grpc_python")), ("open_inference", ("python", "pyi"))],
)
def test_the_files_are_those_that_the_definition_makes(tmp_path, monkeypatch, name, kinds):
    monkeypatch.chdir(ROOT)
    proto = f"app/grpc/{name}.proto"
    assert protoc.main(["protoc", "-I.", *(f"--{k}_out={tmp_path}" for k in kinds), proto]) == 0
    made = {path.name: path.read_text() for path in (tmp_path / "app" / "grpc").iterdir()}
    ends = {"python": "pb2.py", "pyi": "pb2.pyi", "grpc_python": "pb2_grpc.py"}
    assert set(made) == {f"{name}_{ends[kind]}" for kind in kinds}
    for name, text in made.items():
        assert text == (ROOT / "app" / "grpc" / name).read_text(), f"{name}: make proto"


@pytest.mark.parametrize(
    ("message", "model", "more"),
    [
        (messages.Classified, responses.Classified, set()),
        (messages.Prediction, ensemble.Prediction, set()),
        (messages.MemberOpinion, responses.MemberOpinion, set()),
        (messages.Timings, responses.Timings, set()),
        (messages.Stage, responses.StageTiming, set()),
        (messages.Error, responses.ErrorDetail, {"status"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_messages_have_the_fields_of_the_json(message, model: type, more: set[str]):
    in_json = {field.name for field in fields(model)} - {"probabilities"}  # tensors' requests' only
    assert set(message.DESCRIPTOR.fields_by_name) == in_json | more


def errors() -> list[type[TandemError]]:
    assert app.errors  # its classes are there
    found = [TandemError]
    for error in found:
        found += error.__subclasses__()
    return found


@pytest.mark.parametrize("error", errors(), ids=lambda error: error.__name__)
def test_every_error_has_a_status(error):
    assert (code_of(error.status) is grpc.StatusCode.INTERNAL) == (error.status == 500)


def test_what_helps_to_send_again_is_told_from_what_does_not():
    again = {429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}
    assert {status: code_of(status).name for status in again} == again
    assert {code_of(s).name for s in (400, 413, 415, 422)} == {"INVALID_ARGUMENT"}
    assert (number_of(200), number_of(422), number_of(500)) == (0, 3, 13)


def test_the_shorter_of_a_clients_times_counts():
    assert timeout_s_of({}) is None
    assert timeout_s_of({"x-request-timeout-seconds": "0.5"}) == 0.5
    both = {"x-request-timeout-seconds": "99", "x-grpc-timeout": "10S"}
    assert timeout_s_of(both) == pytest.approx(9.0)  # the shorter one


@pytest.mark.parametrize("value", ["nan", "-1", "0", "soon", ""])
def test_a_time_that_makes_no_sense(value):
    with pytest.raises(BadParameterError, match="seconds as a number above 0"):
        timeout_s_of({"x-request-timeout-seconds": value})


def test_the_clients_deadline_in_every_unit():
    given = ["1H", "1M", "1S", "1m", "1u", "1n"]
    times = [timeout_s_of({"x-grpc-timeout": value}) or math.nan for value in given]
    ratios = [round(longer / shorter) for longer, shorter in pairwise(times)]
    assert ratios == [60, 60, 1000, 1000, 1000]
    assert timeout_s_of({"x-grpc-timeout": "2000m"}) == pytest.approx(1.8)


@pytest.mark.parametrize("value", ["", "1", "S", "1x", "-1S", "123456789S", "1S1S"])
def test_a_deadline_that_is_none_is_ignored(value):
    assert timeout_s_of({"x-grpc-timeout": value}) is None


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [("0000000000", 0), ("000140000A", 0x140000A), ("00ffffffff", 2**32 - 1)],
)
def test_the_length_that_a_message_announces(prefix, expected):
    assert announced_bytes({PREFIX_METADATA: prefix}) == expected


@pytest.mark.parametrize(
    "prefix", [None, "", "0100000005", "00000000", "00000000051", "00zzzzzzzz"]
)
def test_a_message_that_does_not_say_or_is_compressed(prefix):
    assert announced_bytes({} if prefix is None else {PREFIX_METADATA: prefix}) is None


def test_grpc_is_off_unless_asked_for():
    assert grpc_port({}) is None
    assert grpc_port({"grpc_options": {"port": 9000}}) is None  # as Serve sees it: no servicer
    content = with_grpc({"grpc_options": {"request_timeout_s": 5}}, 9001)
    assert content["grpc_options"]["request_timeout_s"] == 5
    assert grpc_port(content) == 9001
    assert grpc_port(with_grpc(content, None)) == 9001
    assert with_grpc({"grpc_options": {"port": 9000}}, None) == {"grpc_options": {"port": 9000}}


def test_the_generated_function_is_replaced_by_our_own():
    generated = "app.grpc.tandem_pb2_grpc.add_EnsembleServicer_to_server"
    options = {"port": 9000, "grpc_servicer_functions": ["other.add", generated]}
    changed = with_grpc({"grpc_options": options}, None)["grpc_options"]
    assert changed == {"port": 9000, "grpc_servicer_functions": ["other.add", ADD_SERVICER]}
    assert options["grpc_servicer_functions"] == ["other.add", generated]  # the caller's own


def test_the_servicer_that_serve_is_told_to_import():
    from ray.serve.config import gRPCOptions

    (add,) = gRPCOptions(grpc_servicer_functions=[ADD_SERVICER]).grpc_servicer_func_callable
    assert add.__module__ in sys.modules
    assert add is add_servicer
