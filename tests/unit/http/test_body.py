"""Bodies and forms: read within limits, left unread by a refusal, and gone with the answer."""

import asyncio
import codecs
import gc
import gzip
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from fastapi import Request
from starlette.types import Message, Receive

from app.errors import (
    CLOSE_HEADER,
    BadParameterError,
    BodyTooLargeError,
    ClientGoneError,
    OverloadedError,
    SlowBodyError,
    TooManyFilesError,
    UnsupportedCodingError,
)
from app.http.api import create_api
from app.http.body import (
    DRAIN_FACTOR,
    MAX_BYTES,
    MAX_READS,
    MAX_TEXT_BYTES,
    MAX_TEXTS,
    FileForm,
    Headers,
    read_chunks,
    read_coded_body,
    read_fields,
)
from app.queueing.admission import ByteBudget, Share
from app.settings import Settings
from tests.support.asgi_client import write_keys
from tests.support.fakes import FakeService
from tests.support.raw_asgi import REQUESTS, ask

LIMIT = 100
BOUNDARY = "frontier"


class Channel:
    """Gives chunks one by one; afterwards the client is gone or the body ends."""

    def __init__(self, *chunks: bytes, hangs_up: bool = False) -> None:
        self._messages = [
            {"type": "http.request", "body": chunk, "more_body": hangs_up or i < len(chunks) - 1}
            for i, chunk in enumerate(chunks or (b"",))
        ]
        if hangs_up:
            self._messages.append({"type": "http.disconnect"})
        self.num_read = 0

    async def receive(self) -> dict:
        self.num_read += 1
        return self._messages.pop(0)


class Sent(NamedTuple):
    """A request, as far as reading its body is concerned."""

    channel: "Channel | Silent"
    content_length: str = ""
    content_type: str = ""


async def read_body(sent: Sent, max_bytes: int, budget: ByteBudget | None = None) -> bytes:
    with (budget or ByteBudget(10**9)).share() as share:
        return await read_in(sent, max_bytes, share)


async def read_in(sent: Sent, max_bytes: int, share: Share) -> bytes:
    headers = Headers({"headers": [(b"content-length", sent.content_length.encode("latin-1"))]})
    return await read_coded_body(sent.channel.receive, headers, max_bytes, share)


@pytest.mark.parametrize("chunks", [(b"ab", b"", b"c"), (), (bytes(60), bytes(LIMIT - 60))])
async def test_a_body_within_the_limit_is_joined(chunks):
    assert await read_body(Sent(Channel(*chunks)), LIMIT) == b"".join(chunks)


@pytest.mark.parametrize("length", ["", "-5", "x", "²", "1e3", "+7"])
async def test_a_length_that_is_no_number_is_not_believed(length):
    assert await read_body(Sent(Channel(b"body"), content_length=length), LIMIT) == b"body"


@pytest.mark.parametrize(
    ("chunks", "length", "says", "num_read"),
    [
        ([bytes(60), bytes(41)], "", "101 bytes or more, the limit is 100", 2),
        ([bytes(110)], "5", "110 bytes", 1),  # more than it says
        ([b"short"], "101", "101 bytes", 1),  # still read: the client is to see the answer
        ([b"short"], "99999999999999", "99999999999999 bytes", 1),
        ([bytes(50)] * 7, "", "the limit is 100", 7),  # a little too much is read to its end
        ([bytes(LIMIT)] * 50, "", "the limit is 100", DRAIN_FACTOR + 1),  # far too much is cut off
    ],
    ids=["counted", "says less", "says more", "says far more", "a little", "far too much"],
)
async def test_a_body_over_the_limit_is_refused(chunks, length, says, num_read):
    channel = Channel(*chunks)
    with pytest.raises(BodyTooLargeError, match=says):
        await read_body(Sent(channel, content_length=length), LIMIT)
    assert channel.num_read == num_read


async def test_a_client_that_hangs_up_half_way():
    with pytest.raises(ClientGoneError, match="after 30 bytes"):
        await read_body(Sent(Channel(bytes(30), hangs_up=True)), LIMIT)


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + data + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


async def files_of(
    *chunks: bytes,
    max_bytes: int = 10_000,
    content_type: str = f"multipart/form-data; boundary={BOUNDARY}",
    budget: ByteBudget | None = None,
    **channel: bool,
) -> list[bytes]:
    made = Sent(Channel(*chunks, **channel), content_type=content_type)
    with (budget or ByteBudget(10**9)).share() as share:
        form = FileForm(made.content_type, 3)
        receive, length = made.channel.receive, made.content_length
        await read_chunks(receive, length, max_bytes, share, form.write)
        return form.files()


async def test_files_in_order_however_they_are_cut():
    body = part("b", b"one", "1.jpg") + part("a", b"two", "2.jpg") + part("b", b"", "") + END
    for size in (1, 7, len(body)):
        chunks = [body[i : i + size] for i in range(0, len(body), size)]
        assert await files_of(*chunks) == [b"one", b"two", b""]


async def test_the_limit_of_files():
    three = [part("f", b"x", str(i)) for i in range(3)]
    assert len(await files_of(*three, END)) == 3
    for count in (4, 5, 40):
        many = [part("f", b"x", str(i)) for i in range(count)]
        with pytest.raises(TooManyFilesError, match="more than 3 files"):
            await files_of(*many, END)


@pytest.mark.parametrize(
    ("chunks", "content_type"),
    [
        ([part("f", b"x", "a"), END], "multipart/form-data"),
        ([b"\xff\xd8\xff this is a photo"], f"multipart/form-data; boundary={BOUNDARY}"),
        ([part("f", b"x", "a")[:40], b"\r\n\r\n"], f"multipart/form-data; boundary={BOUNDARY}"),
        ([part("f", b"x", "a"), END], "multipart/form-data; boundary="),
        ([f"--{BOUNDARY}\r\n\r\nnameless\r\n".encode(), END], f"multipart/x; boundary={BOUNDARY}"),
        ([b""], f"multipart/form-data; boundary={BOUNDARY}"),
    ],
    ids=["no boundary", "a photo", "broken header", "empty boundary", "nameless", "empty"],
)
async def test_a_broken_form_is_told_how_to_send_one(chunks, content_type):
    with pytest.raises(BadParameterError, match="curl -F"):
        await files_of(*chunks, content_type=content_type)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ("", "'multipart/form-data' has no boundary"),
        ("; charset=undefined", "has no boundary"),
        ("; boundary", "has no boundary"),
        ("; boundary*=utf-8''frontier", "has no boundary"),
        ("; boundary=" + "b" * 5000, "5000 exceeds maximum of 256"),
        ("; boundary=\xff\xfe", "Expected boundary character"),
        ('; boundary="', "Expected boundary character"),
    ],
)
async def test_a_boundary_that_cannot_be_used(parameters, told):
    body = part("f", b"x", "a") + END
    with pytest.raises(BadParameterError, match=told):
        await files_of(body, content_type=f"multipart/form-data{parameters}")


@pytest.mark.parametrize("charset", ["undefined", "idna", "punycode", "nothing", "hex", "\xff", ""])
async def test_a_charset_has_no_effect(charset):
    """No text of a form is used, and Python's codecs raise errors of all kinds.

    Python also remembers every unknown name that it was asked for, as long as it lives.
    """
    asked: list[str] = []
    search = asked.append  # called with the names that nobody knows
    codecs.register(search)
    try:
        body = part("\xe9..", b"x", "x" * 100) + END
        content_type = f"multipart/form-data; boundary={BOUNDARY}; charset={charset}"
        assert await files_of(body, content_type=content_type) == [b"x"]
    finally:
        codecs.unregister(search)
    assert asked == []


async def test_a_file_name_that_is_not_ascii():
    """As urllib3 1 writes it, and with it many a Python client."""
    head = "Content-Disposition: form-data; name=\"f\"; filename*=utf-8''%E2%82%AC.jpg"
    assert await files_of(f"--{BOUNDARY}\r\n{head}\r\n\r\nx\r\n".encode(), END) == [b"x"]


@pytest.mark.parametrize("encoding", ["base64", "quoted-printable", "\xff", "BINARY", "8bit"])
async def test_an_encoded_file_is_not_taken_for_an_image(encoding):
    headers = f'filename="a"\r\nContent-Transfer-Encoding: {encoding}\r\n\r\n'
    body = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="f"; {headers}eA==\r\n'
    if encoding in ("BINARY", "8bit"):
        assert await files_of(body.encode("latin-1"), END) == [b"eA=="]
        return
    with pytest.raises(BadParameterError, match=f"Content-Transfer-Encoding '{encoding}'.*as they"):
        await files_of(body.encode("latin-1"), END)


async def test_a_form_without_files():
    with pytest.raises(BadParameterError, match="the form has no file"):
        await files_of(END)


def typed_part(content_type: str, data: bytes) -> bytes:
    """Return a part without a file name, as some libraries send an image from memory."""
    head = f'Content-Disposition: form-data; name="image"\r\nContent-Type: {content_type}'
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + data + b"\r\n"


@pytest.mark.parametrize("content_type", ["image/jpeg", "image/png; x=y", "IMAGE/WebP"])
async def test_an_image_without_a_file_name_is_a_file(content_type):
    photo = bytes(5000)
    body = [typed_part(content_type, photo), part("files", b"x", "a"), END]
    assert await files_of(*body) == [photo, b"x"]


async def test_a_few_small_texts_beside_the_files_have_no_effect():
    texts = [part(f"csrf{n}", b"t" * MAX_TEXT_BYTES) for n in range(MAX_TEXTS - 1)]
    body = b"".join([*texts, part("files", b"x", "a"), typed_part("text/plain", b"hello"), END])
    for size in (50, len(body)):
        chunks = [body[i : i + size] for i in range(0, len(body), size)]
        assert await files_of(*chunks, max_bytes=100_000) == [b"x"]
    with pytest.raises(BadParameterError, match="the form has no file"):
        await files_of(part("token", b"t"), END)


@pytest.mark.parametrize("name", ["top_k", "threshold", "model_set"])
async def test_a_parameter_in_the_form_is_refused_rather_than_ignored(name):
    with pytest.raises(BadParameterError, match=rf"text field {name}; .* \(\?{name}="):
        await files_of(part("files", b"x", "a"), part(name, b"3"), END)


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([part("f", b"3")] * (MAX_TEXTS + 1), "more than 16 text fields"),
        ([part("f", bytes(MAX_TEXT_BYTES + 1))], "a text field of more than 1024 bytes"),
        ([typed_part("text/plain", bytes(5000))], "Content-Type image/"),
    ],
)
async def test_many_or_large_texts_are_refused(texts, says):
    with pytest.raises(BadParameterError, match=says):
        await files_of(part("files", b"x", "a"), *texts, END)


@pytest.mark.parametrize("size", [20_000, 3_000_000])
async def test_a_form_over_the_limit_leaves_no_file_open(size):
    """An open temporary file is a ResourceWarning here."""
    chunks = [part("f", bytes(size // 2), "a"), part("f", bytes(size), "b"), END]
    with pytest.raises(BodyTooLargeError):
        await files_of(*chunks, max_bytes=int(size * 0.6))


async def test_a_client_that_hangs_up_within_a_form():
    with pytest.raises(ClientGoneError):
        await files_of(part("f", bytes(50), "a"), hangs_up=True)


async def test_what_is_held_counts_until_the_request_ends():
    budget = ByteBudget(150)
    with budget.share() as share:
        await read_in(Sent(Channel(bytes(60), bytes(40))), LIMIT, share)
        assert budget.num_held == 100
        with pytest.raises(OverloadedError, match=r"hold 120 bytes, of at most 150 .*try again"):
            await read_body(Sent(Channel(bytes(20), bytes(31))), LIMIT, budget)
        assert budget.num_held == 100  # the refused one's are given back
        assert len(await read_body(Sent(Channel(bytes(50))), LIMIT, budget)) == 50
    assert budget.num_held == 0


async def test_a_form_counts_too():
    budget = ByteBudget(300)
    body = part("f", bytes(300), "a") + END
    with pytest.raises(OverloadedError):
        await files_of(body[:200], body[200:], budget=budget)
    assert budget.num_held == 0


async def test_what_has_no_room_is_not_read():
    channel = Channel(bytes(60))
    with pytest.raises(OverloadedError):
        await read_body(Sent(channel, content_length="60"), LIMIT, ByteBudget(50))
    assert channel.num_read == 0


async def test_what_is_only_announced_takes_no_room():
    budget, channel = ByteBudget(100), Silent()
    reading = asyncio.create_task(read_body(Sent(channel, content_length="90"), LIMIT, budget))
    await channel.asked.wait()
    assert len(await read_body(Sent(Channel(bytes(100))), LIMIT, budget)) == 100
    reading.cancel()


async def test_what_is_dropped_is_not_held():
    budget = ByteBudget(LIMIT)
    with budget.share() as share, pytest.raises(BodyTooLargeError):
        await read_in(Sent(Channel(*[bytes(LIMIT)] * 3)), LIMIT, share)
    assert budget.num_held == 0


class Silent:
    """A client that announces a body and sends nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def receive(self) -> dict:
        self.asked.set()
        return await asyncio.Future()


async def read(receive: Receive, timeout_s: float = 60.0, coding: bytes = b"") -> dict:
    request = Request({"type": "http", "headers": [(b"content-encoding", coding)]}, receive)
    return await read_fields(request, timeout_s, BadParameterError, "a and b")


def body(*parts: bytes) -> Receive:
    left = list(parts)

    async def receive() -> Message:
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left)}

    return receive


async def test_an_object_in_parts() -> None:
    assert await read(body(b'{"a"', b": 1}")) == {"a": 1}


async def test_a_coded_body_is_inflated_or_refused() -> None:
    assert await read(body(gzip.compress(b'{"a": 1}')), coding=b"gzip") == {"a": 1}
    with pytest.raises(UnsupportedCodingError, match="send gzip, deflate"):
        await read(body(b"x"), coding=b"br")
    with pytest.raises(BodyTooLargeError):
        await read(body(gzip.compress(b" " * (MAX_BYTES + 1))), coding=b"gzip")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x", "the body is no JSON"),
        (b"", "the body is no JSON"),
        (b"[1]", "the body is no object; send a and b"),
    ],
)
async def test_what_is_no_object(content: bytes, message: str) -> None:
    with pytest.raises(BadParameterError, match=message):
        await read(body(content))


async def test_an_empty_body_may_stand_for_an_object() -> None:
    async def read_optional(content: bytes) -> dict:
        request = Request({"type": "http", "headers": []}, body(content))
        return await read_fields(request, 60.0, BadParameterError, "a and b", may_be_empty=True)

    assert await read_optional(b"") == {}
    with pytest.raises(BadParameterError, match="the body is no object; send a and b"):
        await read_optional(b"[]")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("put", "/v1/traffic"),
        ("post", "/v1/feedback"),
        ("post", "/v2/repository/index"),
        ("post", "/v2/repository/models/{model_name}/load"),
        ("post", "/v2/systemsharedmemory/region/{region_name}/register"),
    ],
)
def test_the_refusals_of_a_small_body_are_documented(method: str, path: str) -> None:
    documented = create_api(FakeService()).openapi()["paths"][path][method]["responses"]
    assert documented.keys() >= {"400", "408", "413", "415"}


async def test_an_object_over_the_limit() -> None:
    with pytest.raises(BodyTooLargeError):
        await read(body(b" " * MAX_BYTES, b"{}"))


async def test_a_body_that_does_not_come() -> None:
    async def receive() -> Message:
        return await asyncio.Future()

    with pytest.raises(SlowBodyError, match=r"the body had not arrived after 0\.01 s"):
        await read(receive, 0.01)


LENGTH = (b"content-length", b"1000000")


class Upload:
    """A client that sends ``chunks``, and then nothing: not even the end if ``is_slow``."""

    def __init__(self, *chunks: bytes, is_slow: bool = True) -> None:
        self._chunks, self._is_slow = list(chunks), is_slow
        self.num_read = 0

    async def receive(self) -> dict[str, Any]:
        self.num_read += 1
        if not self._chunks:
            await asyncio.Future()
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": self._is_slow or self._chunks}


def status_and_headers(
    api: Any, upload: Upload, path: str, method: str = "POST", *more: tuple[bytes, bytes]
) -> tuple[int, dict[bytes, bytes]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "query_string": b"",
        "headers": [*(more or (LENGTH,)), (b"x-request-id", b"r1")],
        "client": ("127.0.0.1", 9),
    }

    async def run() -> None:
        async with asyncio.timeout(20):
            await api(scope, upload.receive, send)

    asyncio.run(run())
    return sent[0]["status"], dict(sent[0]["headers"])


def is_closed(headers: dict[bytes, bytes]) -> bool:
    told = {headers.get(b"connection"), headers.get(CLOSE_HEADER.encode())}
    assert told in ({b"close", b"1"}, {None})
    return told != {None}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/nothing", 404),
        ("POST", "/healthz", 405),
        ("PUT", "/v1/classify", 405),
        ("GET", "/healthz", 200),
        ("POST", "/v2/models/nothing/infer", 404),
    ],
)
def test_a_route_that_reads_no_body(method: str, path: str, status: int) -> None:
    api = create_api(FakeService())
    found, headers = status_and_headers(api, Upload(b"begun"), path, method)
    assert (found, is_closed(headers)) == (status, True)
    found, headers = status_and_headers(api, Upload(b"all", is_slow=False), path, method)
    assert (found, is_closed(headers)) == (status, False)


def test_a_body_that_comes_and_comes_is_not_read_for_ever() -> None:
    upload = Upload(*(b"a" for _ in range(100)))
    _, headers = status_and_headers(create_api(FakeService()), upload, "/nothing")
    assert is_closed(headers)
    assert upload.num_read == MAX_READS


def test_a_request_that_is_refused_before_its_body() -> None:
    refused = (LENGTH, (b"x-request-timeout-seconds", b"5_0"))
    api = create_api(FakeService())
    found, headers = status_and_headers(api, Upload(), "/v1/classify", "POST", *refused)
    assert (found, is_closed(headers)) == (422, True)


def test_without_a_key_nothing_is_read(tmp_path) -> None:
    path = write_keys(tmp_path)
    upload = Upload(b"all", is_slow=False)
    api = create_api(FakeService(Settings(api_keys_file=path)))
    found, headers = status_and_headers(api, upload, "/v1/classify")
    assert (found, is_closed(headers), upload.num_read) == (401, True, 0)


def test_who_waits_to_be_told_to_go_on_is_not_told() -> None:
    expects = (LENGTH, (b"expect", b"100-continue"))
    upload = Upload(b"all", is_slow=False)
    api = create_api(FakeService())
    found, headers = status_and_headers(api, upload, "/nothing", "POST", *expects)
    assert (found, is_closed(headers), upload.num_read) == (404, True, 0)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_was_read_keeps_its_connection(chunked: bool) -> None:
    length = (b"transfer-encoding", b"chunked") if chunked else (b"content-length", b"5")
    upload = Upload(b"ima", b"ge", is_slow=False)
    api = create_api(FakeService())
    found, headers = status_and_headers(api, upload, "/v1/classify", "POST", length)
    assert (found, is_closed(headers)) == (200, False)


OF_REQUESTS = ("app.http", "app.graph", "python_multipart")


@contextmanager
def left_to_collector() -> Iterator[list[object]]:
    """Give the list of what only the garbage collector would end; it is filled at the end."""
    found: list[object] = []
    gc.collect()
    gc.freeze()  # what the process has by now need not be looked through
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.slow  # make test sends bodies of each kind in tests/unit/http
@pytest.mark.parametrize("name", REQUESTS)
def test_no_body_waits_for_the_garbage_collector(name: str) -> None:
    api, asked = create_api(FakeService()), REQUESTS[name]

    first = ask(api, asked)  # what it alone makes may take the place of other tests' objects
    with left_to_collector() as found:
        second = ask(api, asked)
    assert second.status == first.status != 0
    kept = [one for one in found if type(one).__module__.startswith(OF_REQUESTS)]
    assert kept == []
    assert not [one for one in found if isinstance(one, BaseException)]  # whose frames hold more
