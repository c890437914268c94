"""The headers of a request, and the identity that one without gets."""

import uuid

from app.http.headers import Headers, new_request_id


def test_a_request_without_an_identity_gets_a_random_uuid():
    ids = [new_request_id() for _ in range(200)]
    for text in ids:
        found = uuid.UUID(text)
        assert str(found) == text
        assert (found.version, found.variant) == (4, uuid.RFC_4122)
    assert len(set(ids)) == len(ids)
    assert {text[19] for text in ids} == set("89ab")  # all that the variant leaves open


def test_of_a_header_that_is_sent_twice_the_first_counts():
    headers = Headers({"headers": [(b"x-request-id", b"one"), (b"x-request-id", b"two")]})
    assert headers.request_id == "one"
    assert headers.joined(b"x-request-id") == "one, two"


def test_all_who_read_a_request_without_an_identity_see_the_same():
    scope = {"headers": [(b"x-request-id", b"")]}
    assert Headers(scope).request_id == Headers(scope).request_id
