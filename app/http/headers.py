"""The headers of one request, looked up by name."""

import random
from functools import cached_property

from starlette.types import Scope

REQUEST_ID = b"x-request-id"
MADE_ID = "tandem.request_id"  # in a scope without the header: all that read it see one id


class Headers:
    """Headers by lower-case name; of repeated ones the first."""

    def __init__(self, scope: Scope) -> None:
        self._scope, self._sent = scope, scope["headers"]
        self._values: dict[bytes, bytes] = dict(reversed(self._sent))

    def get(self, name: bytes) -> str | None:
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def __contains__(self, name: bytes) -> bool:
        return name in self._values

    def joined(self, name: bytes) -> str | None:
        """Return the values of a header that may be repeated, joined; None if it is absent."""
        if name not in self._values:
            return None
        return ", ".join(value.decode("latin-1") for sent, value in self._sent if sent == name)

    def text(self, name: bytes) -> str:
        return self._values.get(name, b"").decode("latin-1")

    @cached_property
    def request_id(self) -> str:
        """The X-Request-ID: the client's, or one that Serve made and sends back."""
        return self.text(REQUEST_ID) or self._scope.setdefault(MADE_ID, new_request_id())


def new_request_id() -> str:
    """Return a UUID of version 4, in the form that Serve uses.

    It does not use the system's random numbers: that call releases the GIL, and getting it back may
    take milliseconds while other threads decode. The id is not a secret.
    """
    digits = f"{random.getrandbits(128):032x}"
    variant = "89ab"[random.getrandbits(2)]  # of RFC 9562; the 4 is its version
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
