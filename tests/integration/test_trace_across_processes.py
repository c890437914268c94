"""A trace through processes: every stage a deployment, spans by OTLP over HTTP."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.services.deployed import MEMBERS
from tests.support.tiny_networks import picture
from tests.support.trace_checks import by_trace, check_batches, check_whole, num_whole, one

NUM_REQUESTS = 8


def test_the_stages_of_other_processes_are_in_the_requests_trace(client, spans):
    def send(index):
        body = picture(("red", "green", "blue")[index % 3])
        return client.post("/v1/classify", content=body, headers={"x-request-id": f"t{index}"})

    spans.spans.clear()
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = list(pool.map(send, range(NUM_REQUESTS)))
    identities = {answer.headers["x-trace-id"] for answer in answers}
    assert len(identities) == NUM_REQUESTS
    # Those of an earlier test may still arrive.
    spans.wait_for(lambda found: num_whole(own(found, identities), MEMBERS) == NUM_REQUESTS)
    found = own(spans.spans, identities)
    traces = by_trace(found)
    assert set(traces) == identities
    for trace in traces.values():
        root = check_whole(trace)
        assert root.parent_id is None
        places = {
            name: one(trace, f"infer {name}").resource["service.instance.id"] for name in MEMBERS
        }
        assert {name: place.split("#")[0] for name, place in places.items()} == {
            name: name for name in MEMBERS
        }
        assert root.resource["service.instance.id"].startswith("Gateway#")
        assert one(trace, "decode").resource["service.instance.id"].startswith("Decoder#")
    for member in MEMBERS:
        check_batches(found, member, NUM_REQUESTS)


def own(spans, identities):
    """Return the spans of these traces, and all batches."""
    return [span for span in spans if span.trace_id in identities or span.name == "batch"]
