"""The headers of one request, looked up by name."""

import random
from functools import cached_property

from starlette.types import Scope

REQUEST_ID = b"x-request-id"


class Headers:
    """Headers by lower-case name; of one that is sent twice the first counts."""

    def __init__(self, scope: Scope) -> None:
        self._sent = scope["headers"]
        self._values: dict[bytes, bytes] = dict(reversed(self._sent))

    def get(self, name: bytes) -> str | None:
        """Return a header's value; None if it is not there."""
        value = self._values.get(name)
        return None if value is None else value.decode("latin-1")

    def joined(self, name: bytes) -> str | None:
        """Return the values of a header that may be sent several times; None if it is not there."""
        values = [value.decode("latin-1") for sent, value in self._sent if sent == name]
        return ", ".join(values) if values else None

    def text(self, name: bytes) -> str:
        """Return a header's value; an empty text if it is not there."""
        return self._values.get(name, b"").decode("latin-1")

    @cached_property
    def request_id(self) -> str:
        """The X-Request-ID: the client's own, or the one that Serve made and sends back."""
        return self.text(REQUEST_ID) or new_request_id()


def new_request_id() -> str:
    """Return a UUID of version 4, made as Serve makes a request's.

    Without the operating system's random numbers: to ask for them gives up the interpreter's lock,
    and to get it back may take milliseconds while other threads decode. Nothing secret hangs on it.
    """
    digits = f"{random.getrandbits(128):032x}"
    variant = "89ab"[random.getrandbits(2)]  # RFC 9562's, as the 4 is its version
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
