"""Cache-Control of a request."""

import pytest

from app.graph.request import cache_use_of


@pytest.mark.parametrize(
    ("header", "use"),
    [
        (None, "use"),
        ("", "use"),
        ("max-age=0", "use"),
        ("private, x-no-store", "use"),
        ("no-cache", "renew"),
        ("No-Cache", "renew"),
        ("max-age=0,no-cache", "renew"),
        ("no-cache=x", "renew"),
        ("no-store", "off"),
        (" no-store ", "off"),
        ("no-cache, no-store", "off"),
        ("no-store, no-cache", "off"),
        (", ,NO-STORE;", "use"),  # no directive that there is
    ],
)
def test_what_a_client_allows(header, use):
    assert cache_use_of(header) == use
