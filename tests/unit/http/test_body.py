"""Bodies and forms: read within limits, left unread by a refusal, and gone with the answer."""

import asyncio
import codecs
import gc
import gzip
from contextlib import contextmanager

import pytest
from fastapi import Request

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
from tests.support.cases import cases
from tests.support.fakes import FakeService
from tests.support.raw_asgi import REQUESTS, Asked, ask

LIMIT = 100
BOUNDARY = "frontier"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
PHOTO = bytes(5000)
BOMB = gzip.compress(b" " * (MAX_BYTES + 1))
NO_OBJECT = "the body is no object; send a and b"
LENGTH = (b"content-length", b"1000000")
OF_REQUESTS = ("app.http", "app.graph", "python_multipart")


class Client:
    """Sends chunks one by one; ``then`` the body ends, or the client "hangs up" or "stalls"."""

    def __init__(self, *chunks: bytes, then: str = "ends") -> None:
        self._chunks, self._then = list(chunks), then
        if then == "ends" and not chunks:
            self._chunks = [b""]
        self.num_read, self.asked = 0, asyncio.Event()

    async def receive(self):
        self.num_read += 1
        self.asked.set()
        if self._chunks:
            chunk = self._chunks.pop(0)
            more = self._then != "ends" or bool(self._chunks)
            return {"type": "http.request", "body": chunk, "more_body": more}
        if self._then == "hangs up":
            return {"type": "http.disconnect"}
        return await asyncio.Future()


async def read_body(client: Client, length: str = "", budget: ByteBudget | None = None) -> bytes:
    with (budget or ByteBudget(10**9)).share() as share:
        return await read_in(share, client, length)


async def read_in(share: Share, client: Client, length: str = "") -> bytes:
    headers = Headers({"headers": [(b"content-length", length.encode("latin-1"))]})
    return await read_coded_body(client.receive, headers, LIMIT, share)


@cases(
    "chunks, length",
    *((chunks, "") for chunks in ((b"ab", b"", b"c"), (), (bytes(60), bytes(LIMIT - 60)))),
    *(((b"body",), length) for length in ("-5", "x", "²", "1e3", "+7")),  # not believed
)
async def test_a_body_within_the_limit_is_joined(chunks, length):
    assert await read_body(Client(*chunks), length) == b"".join(chunks)


@cases(
    "chunks, length, says, num_read",
    ([bytes(60), bytes(41)], "", "101 bytes or more, the limit is 100", 2),
    ([bytes(110)], "5", "110 bytes", 1),  # more than it says
    ([b"short"], "101", "101 bytes", 1),  # still read: the client is to see the answer
    ([b"short"], "99999999999999", "99999999999999 bytes", 1),
    ([bytes(50)] * 7, "", "the limit is 100", 7),  # a little too much is read to its end
    ([bytes(LIMIT)] * 50, "", "the limit is 100", DRAIN_FACTOR + 1),  # far too much is cut off
    ids=["counted", "says less", "says more", "says far more", "a little", "far too much"],
)
async def test_a_body_over_the_limit_is_refused(chunks, length, says, num_read):
    client = Client(*chunks)
    with pytest.raises(BodyTooLargeError, match=says):
        await read_body(client, length)
    assert client.num_read == num_read


async def test_a_client_that_hangs_up_half_way():
    with pytest.raises(ClientGoneError, match="after 30 bytes"):
        await read_body(Client(bytes(30), then="hangs up"))
    with pytest.raises(ClientGoneError):
        await files_of(part("f", bytes(50), "a"), then="hangs up")


def part(name: str, data: bytes, filename: str | None = None) -> bytes:
    file = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
    return head.encode() + data + b"\r\n"


def part_with(header: str, data: bytes, name: str = 'name="f"') -> bytes:
    """Return a part with another header, as some libraries send an image from memory."""
    head = f"--{BOUNDARY}\r\nContent-Disposition: form-data; {name}\r\n{header}\r\n\r\n"
    return head.encode("latin-1") + data + b"\r\n"


def encoded(encoding: str) -> bytes:
    name = 'name="f"; filename="a"'
    return part_with(f"Content-Transfer-Encoding: {encoding}", b"eA==", name) + END


END = f"--{BOUNDARY}--\r\n".encode()
FILE = part("f", b"x", "a")
ONE = FILE + END


async def files_of(*chunks, max_bytes=10_000, content_type=FORM, budget=None, then="ends"):
    client = Client(*chunks, then=then)
    with (budget or ByteBudget(10**9)).share() as share:
        form = FileForm(content_type, 3)
        await read_chunks(client.receive, "", max_bytes, share, form.write)
        return form.files()


async def test_files_in_order_however_they_are_cut_and_up_to_the_limit():
    body = part("b", b"one", "1.jpg") + part("a", b"two", "2.jpg") + part("b", b"", "3.jpg") + END
    for size in (1, 7, len(body)):
        chunks = [body[i : i + size] for i in range(0, len(body), size)]
        assert await files_of(*chunks) == [b"one", b"two", b""]
    assert len(await files_of(*[FILE] * 3, END)) == 3
    for count in (4, 5, 40):
        with pytest.raises(TooManyFilesError, match="more than 3 files"):
            await files_of(*[FILE] * count, END)


async def test_a_file_field_that_nobody_used_is_no_file():
    unused = part("more", b"", "")
    assert await files_of(unused, FILE * 3, unused, END) == [b"x"] * 3
    assert await files_of(FILE, part("more", b"y", ""), END) == [b"x", b"y"]
    with pytest.raises(TooManyFilesError, match="more than 3 files"):
        await files_of(FILE * 3, part("more", b"y", ""), END)
    with pytest.raises(BadParameterError, match="no file, and a file field that is empty"):
        await files_of(unused, END)
    assert await files_of(FILE, unused * MAX_TEXTS, END) == [b"x"]
    with pytest.raises(BadParameterError, match="more than 16 empty file fields; leave them out"):
        await files_of(FILE, unused * (MAX_TEXTS + 1), END)


NAMELESS = f"--{BOUNDARY}\r\n\r\nnameless\r\n".encode() + END


@cases(
    "body, content_type, says",
    (ONE, "multipart/form-data", "'multipart/form-data' has no boundary.*curl -F"),
    (b"\xff\xd8\xff this is a photo", FORM, "curl -F"),
    (FILE[:40] + b"\r\n\r\n", FORM, "curl -F"),
    (ONE, "multipart/form-data; boundary=", "curl -F"),
    (NAMELESS, f"multipart/x; boundary={BOUNDARY}", "curl -F"),
    (b"", FORM, "curl -F"),
    (ONE, "multipart/form-data; charset=undefined", "has no boundary"),
    (ONE, "multipart/form-data; boundary", "has no boundary"),
    (ONE, "multipart/form-data; boundary*=utf-8''frontier", "has no boundary"),
    (ONE, "multipart/form-data; boundary=" + "b" * 5000, "5000 exceeds maximum of 256"),
    (ONE, "multipart/form-data; boundary=\xff\xfe", "Expected boundary character"),
    (ONE, 'multipart/form-data; boundary="', "Expected boundary character"),
    (encoded("base64"), FORM, "Content-Transfer-Encoding 'base64'.*as they"),
    (encoded("quoted-printable"), FORM, "Encoding 'quoted-printable'.*as they"),
    (encoded("\xff"), FORM, "Content-Transfer-Encoding '\xff'.*as they"),
    (END, FORM, "the form has no file"),
    (part("token", b"t") + END, FORM, "the form has no file"),
    # A parameter in the form is refused rather than ignored.
    (FILE + part("top_k", b"3") + END, FORM, r"text field top_k; .* \(\?top_k="),
    (FILE + part("threshold", b"3") + END, FORM, r"text field threshold; .* \(\?threshold="),
    (FILE + part("model_set", b"3") + END, FORM, r"text field model_set; .* \(\?model_set="),
    (FILE + part("f", b"3") * (MAX_TEXTS + 1) + END, FORM, "more than 16 text fields"),
    (FILE + part("f", bytes(MAX_TEXT_BYTES + 1)) + END, FORM, "of more than 1024 bytes; an"),
    (
        part("f", b"data:image/jpeg;base64," + b"A" * 2000) + END,
        FORM,
        "bytes, a data URL; an image",
    ),
    (part("f", b"/9j/4AAQ" * 200) + END, FORM, "of more than 1024 bytes, base64; an image"),
    (part("f", b"b'" + rb"\xff" * 300) + END, FORM, "the text that Python writes of bytes; an"),
    (part_with("Content-Type: text/plain", bytes(5000)) + END, FORM, "Content-Type image/"),
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
async def test_a_broken_form_is_told_how_to_send_one(body, content_type, says):
    with pytest.raises(BadParameterError, match=says):
        await files_of(body, content_type=content_type)


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
        assert await files_of(body, content_type=f"{FORM}; charset={charset}") == [b"x"]
    finally:
        codecs.unregister(search)
    assert asked == []


@cases(
    "first, expected",
    # As urllib3 1 writes it, and with it many a Python client.
    (part_with("X: y", b"x", "name=\"f\"; filename*=utf-8''%E2%82%AC.jpg"), b"x"),
    (encoded("BINARY").removesuffix(END), b"eA=="),
    (encoded("8bit").removesuffix(END), b"eA=="),
    (part_with("Content-Type: image/jpeg", PHOTO), PHOTO),  # without a file name
    (part_with("Content-Type: image/png; x=y", PHOTO), PHOTO),
    (part_with("Content-Type: IMAGE/WebP", PHOTO), PHOTO),
    ids=["name that is not ASCII", "binary", "8bit", "jpeg", "png", "webp"],
)
async def test_what_is_a_file_too(first, expected):
    assert await files_of(first, ONE) == [expected, b"x"]


async def test_a_few_small_texts_beside_the_files_have_no_effect():
    texts = [part(f"csrf{n}", b"t" * MAX_TEXT_BYTES) for n in range(MAX_TEXTS - 1)]
    body = b"".join([*texts, FILE, part_with("Content-Type: text/plain", b"hello"), END])
    for size in (50, len(body)):
        chunks = [body[i : i + size] for i in range(0, len(body), size)]
        assert await files_of(*chunks, max_bytes=100_000) == [b"x"]


@pytest.mark.parametrize("size", [20_000, 3_000_000])
async def test_a_form_over_the_limit_leaves_no_file_open(size):
    """An open temporary file is a ResourceWarning here."""
    chunks = [part("f", bytes(size // 2), "a"), part("f", bytes(size), "b"), END]
    with pytest.raises(BodyTooLargeError):
        await files_of(*chunks, max_bytes=int(size * 0.6))


async def test_what_is_held_counts_until_the_request_ends():
    budget = ByteBudget(150)
    with budget.share() as share:
        await read_in(share, Client(bytes(60), bytes(40)))
        assert budget.num_held == 100
        with pytest.raises(OverloadedError, match=r"hold 120 bytes, of at most 150 .*try again"):
            await read_body(Client(bytes(20), bytes(31)), budget=budget)
        assert budget.num_held == 100  # the refused one's are given back
        assert len(await read_body(Client(bytes(50)), budget=budget)) == 50
    assert budget.num_held == 0


async def test_what_is_only_announced_takes_no_room_and_what_has_none_is_not_read():
    budget, client = ByteBudget(100), Client(then="stalls")
    reading = asyncio.create_task(read_body(client, "90", budget))
    await client.asked.wait()
    assert len(await read_body(Client(bytes(100)), budget=budget)) == 100
    reading.cancel()
    client = Client(bytes(60))
    with pytest.raises(OverloadedError):
        await read_body(client, "60", ByteBudget(50))
    assert client.num_read == 0


async def test_a_form_counts_too_and_what_is_dropped_is_not_held():
    budget, form = ByteBudget(300), part("f", bytes(300), "a") + END
    with pytest.raises(OverloadedError):
        await files_of(form[:200], form[200:], budget=budget)
    assert budget.num_held == 0
    budget = ByteBudget(LIMIT)
    with budget.share() as share, pytest.raises(BodyTooLargeError):
        await read_in(share, Client(*[bytes(LIMIT)] * 3))
    assert budget.num_held == 0


async def read(client, coding=b"", timeout_s=60.0, **more):
    request = Request({"type": "http", "headers": [(b"content-encoding", coding)]}, client.receive)
    return await read_fields(request, timeout_s, BadParameterError, "a and b", **more)


async def test_an_object_in_parts_or_coded():
    assert await read(Client(b'{"a"', b": 1}")) == {"a": 1}
    assert await read(Client(gzip.compress(b'{"a": 1}')), b"gzip") == {"a": 1}
    assert await read(Client(b""), may_be_empty=True) == {}


@cases("client, more, error, says", 
        (Client(b"x"), {}, BadParameterError, "the body is no JSON"),
        (Client(b""), {}, BadParameterError, "the body is no JSON"),
        (Client(b"[1]"), {}, BadParameterError, NO_OBJECT),
        (Client(b"[]"), {"may_be_empty": True}, BadParameterError, NO_OBJECT),
        (Client(b"x"), {"coding": b"br"}, UnsupportedCodingError, "send gzip, deflate"),
        (Client(BOMB), {"coding": b"gzip"}, BodyTooLargeError, "more than"),
        (Client(b" " * MAX_BYTES, b"{}"), {}, BodyTooLargeError, "the limit is"),
        (Client(then="stalls"), {"timeout_s": 0.01}, SlowBodyError, r"had not arrived after 0\.01"),
    
)  # fmt: skip
async def test_what_is_no_object(client, more, error, says):
    with pytest.raises(error, match=says):
        await read(client, **more)


@cases(
    "route",
    *("PUT /v1/traffic", "POST /v1/feedback", "POST /v2/repository/index"),
    "POST /v2/repository/models/{model_name}/load",
    "POST /v2/systemsharedmemory/region/{region_name}/register",
)
def test_the_refusals_of_a_small_body_are_documented(route: str) -> None:
    method, path = route.lower().split()
    documented = create_api(FakeService()).openapi()["paths"][path][method]["responses"]
    assert documented.keys() >= {"400", "408", "413", "415"}


def answered(client, path, *headers, method="POST", **settings):
    """Return the status of the answer, and whether it closes the connection."""
    api = create_api(FakeService(Settings(**settings) if settings else None))

    async def app(scope, _, send):
        async with asyncio.timeout(20):
            await api(scope, client.receive, send)

    told = ask(app, Asked(method, path, headers=headers or [LENGTH]))
    assert told.headers is not None
    closes = {told.headers.get(b"connection"), told.headers.get(CLOSE_HEADER.encode())}
    assert closes in ({b"close", b"1"}, {None})
    return told.status, closes != {None}


@cases(
    "method, path, status",
    ("POST", "/nothing", 404),
    ("POST", "/healthz", 405),
    ("PUT", "/v1/classify", 405),
    ("GET", "/healthz", 200),
    ("POST", "/v2/models/nothing/infer", 404),
)
def test_a_route_that_reads_no_body(method: str, path: str, status: int) -> None:
    assert answered(Client(b"begun", then="stalls"), path, method=method) == (status, True)
    assert answered(Client(b"all"), path, method=method) == (status, False)


def test_a_body_that_comes_and_comes_is_not_read_for_ever() -> None:
    client = Client(*[b"a"] * 100, then="stalls")
    assert answered(client, "/nothing") == (404, True)
    assert client.num_read == MAX_READS


def test_without_a_key_or_where_the_client_waits_nothing_is_read(tmp_path) -> None:
    client, expects = Client(b"all"), (b"expect", b"100-continue")
    assert answered(client, "/v1/classify", api_keys_file=write_keys(tmp_path)) == (401, True)
    assert answered(client, "/nothing", LENGTH, expects) == (404, True)
    assert client.num_read == 0


@cases(
    "client, headers, answer",
    (Client(then="stalls"), [LENGTH, (b"x-request-timeout-seconds", b"5_0")], (422, True)),
    (Client(b"ima", b"ge"), [(b"transfer-encoding", b"chunked")], (200, False)),
    (Client(b"ima", b"ge"), [(b"content-length", b"5")], (200, False)),
)
def test_a_body_that_was_read_keeps_its_connection(client, headers, answer):
    assert answered(client, "/v1/classify", *headers) == answer


@contextmanager
def left_to_collector():
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
    assert [one for one in found if type(one).__module__.startswith(OF_REQUESTS)] == []
    assert not [one for one in found if isinstance(one, BaseException)]  # whose frames hold more
