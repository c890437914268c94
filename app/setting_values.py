"""What a single setting may say: addresses, names of functions, paths, room in queues, keys."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    IPvAnyNetwork,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from app.errors import ConfigError
from models.errors import TandemError
from models.files import with_home
from models.machine import pip_install
from models.record import YamlError, parse_yaml
from models.stores import EXTRAS, OBJECT_STORES, split_version

SCHEMES = ("redis:", "rediss:")  # the second one is over TLS
EXAMPLE = "redis://HOST:PORT/DB, such as redis://10.0.0.5:6379/0"
# The schemes that an exporter takes, and examples.
TRACE_ENDPOINTS = {
    "otlp": (("http", "https"), "http://HOST:4317 (gRPC) or http://HOST:4318"),
    "jaeger": (("udp", "http", "https"), "udp://HOST:6831 or http://HOST:14268"),
}

# What a script of an allowed origin may read of an answer beside its body and the usual headers.
EXPOSED = (
    *("inference-header-content-length", "ratelimit", "ratelimit-policy", "retry-after"),
    *("www-authenticate", "x-request-id", "x-trace-id"),
)
Networks = tuple[IPvAnyNetwork, ...]
# Scheme, host and port; a scheme's usual port is left out, and letters are small.
ORIGIN = re.compile(
    r"(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://"
    r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?"
)


SHARES_TOLERANCE = 1e-6  # percent, of a sum of floats
NO_TRACE_FILES = (
    "the service writes no files of traces. Set trace_endpoint to a collector, such as Jaeger at "
    "http://localhost:4317"
)
# Settings of earlier versions, and what to write instead.
RETIRED = {
    "affinity": "leave it out. Whole num_cpus in the deployment's ray_actor_options limit each "
    "replica's threads; to bind a service to a socket, start it with numactl or taskset",
    "cascade_margin": "write plan: fast in its place. It asks fewer members by the set's own fast "
    "plan, which tandem evaluate SET --images DIR --plan measures and writes into the manifest",
    "trace_dir": f"leave it out, {NO_TRACE_FILES}",
    "trace_mib": f"leave it out, {NO_TRACE_FILES}",
}
# In these ~ is the home folder.
UserPath = Annotated[Path | None, AfterValidator(lambda path: path and with_home(path))]
UserPaths = Annotated[tuple[Path, ...], AfterValidator(lambda paths: tuple(map(with_home, paths)))]


@dataclass(frozen=True)
class RedisAddress:
    """A server and a database of it; ``shown`` is without the password that ``url`` may have."""

    url: str
    shown: str

    @classmethod
    def of(cls, address: str) -> Self:
        """Read an address.

        Raises:
            ValueError: it is none; the message repeats no password.
        """
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError as error:  # a port that is no number, brackets that do not close
            raise ValueError(f"its port is no number from 1 to 65535: give {EXAMPLE}") from error
        if f"{parts.scheme}:" not in SCHEMES or not parts.hostname or port is None or port == 0:
            raise ValueError(f"it has no host or no port: give {EXAMPLE}")
        database = parts.path.removeprefix("/") or "0"
        if not (database.isascii() and database.isdigit()) or parts.query or parts.fragment:
            raise ValueError(f"after the port comes the number of a database alone: give {EXAMPLE}")
        _, _, place = parts.netloc.rpartition("@")
        return cls(*(f"{parts.scheme}://{at}/{database}" for at in (parts.netloc, place)))


def _check_cache(place: str) -> str:
    """Return it; ValueError: not none, local or a Redis. The message repeats no password."""
    if place in ("none", "local"):
        return place
    if not place.startswith(SCHEMES):
        shown = place.partition("://")[0][:20]  # a password may come after it
        raise ValueError(f"cache is {shown!r}: give none, local, or {EXAMPLE}")
    try:
        RedisAddress.of(place)
    except ValueError as error:
        raise ValueError(f"cache is no address of a Redis: {error}") from error
    return place


def check_redis_client(cache: str) -> None:
    """Raise :class:`ConfigError` if ``cache`` wants Python's client of Redis, and it is missing."""
    if cache.startswith(SCHEMES) and find_spec("redis") is None:
        raise ConfigError(
            "cache is a Redis, and this Python has no client for one: "
            f"{pip_install('redis')}, or set cache to local or none"
        )


def check_trace_endpoint(exporter: str, endpoint: str | None) -> None:
    """Raise ValueError if it is none; exporters that send nowhere take no notice of it."""
    if endpoint is None or exporter not in TRACE_ENDPOINTS:
        return
    schemes, example = TRACE_ENDPOINTS[exporter]
    try:
        parts = urlsplit(endpoint)
        is_one = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        is_one = False
    if not is_one:
        raise ValueError(f"trace_endpoint is {endpoint[:80]!r}; {exporter} takes {example}")


def check_origins(origins: tuple[str, ...]) -> tuple[str, ...]:
    """Return them; ValueError: one is no origin as browsers write it (RFC 6454), nor ``*``."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin[:80]!r} is no origin: give scheme, host and port as https://shop.example "
                "or http://localhost:3000, in small letters, without a path or a slash at the end, "
                "or '*'"
            )
    return origins


def check_sample_place(ratio: float, place: str | None) -> None:
    """Raise ValueError if samples have no place, or it is a URL that is not written to."""
    if ratio > 0 and place is None:
        raise ValueError(
            f"sample_ratio is {ratio:g}, and sample_dir is not set: set it to a folder or a URL "
            "as s3://BUCKET/FOLDER, or sample_ratio to 0"
        )
    scheme, separator, rest = (place or "").partition("://")
    if not separator:
        return
    host = rest.partition("/")[0]
    if "@" in host:
        raise ValueError(
            f"sample_dir is a {scheme}:// URL with credentials, which logs would show: leave them "
            "out, and give them in environment variables"
        )
    if scheme not in EXTRAS or not host or "?" in rest or "#" in rest:
        raise ValueError(f"sample_dir is a {scheme[:20]!r} URL: give a folder, or {OBJECT_STORES}")


def check_teach_place(place: str | None, *, is_on: bool) -> None:
    """Raise ValueError if photographs that are taught have no place, or it is no folder."""
    if is_on and place is None:
        raise ValueError("teach is true, and teach_dir is not set: set it to a folder")
    if place is not None and "://" in place:
        raise ValueError(
            f"teach_dir is a {place.partition('://')[0][:20]!r} URL: give a folder; tandem learn "
            "--corrections reads it, and a store can be copied from it"
        )


def check_shares(shares: Mapping[str, float]) -> None:
    """Raise ValueError if they are no percentages of versions, in sum 100."""
    for name, share in shares.items():
        if not 0 <= share <= 100:  # NaN too
            raise ValueError(f"the share of {name[:80]} is {share:g}; give a percent, 0 to 100")
    if abs((total := sum(shares.values())) - 100) > SHARES_TOLERANCE:
        text = ", ".join(f"{name[:80]} {share:g}" for name, share in shares.items()) or "none"
        way = (
            f"{abs(total - 100):g} more than 100" if total > 100 else f"{100 - total:g} are missing"
        )
        raise ValueError(f"shares sum to {total:g}, not to 100 ({text}): {way}")


def set_in_traffic(model_set: str | None, main: str) -> str:
    """Return ``main``, of the traffic's versions; ValueError: ``model_set`` names another set."""
    if model_set is not None and split_version(model_set)[0] != split_version(main)[0]:
        raise ValueError(
            f"model_set is {model_set[:80]!r}, and traffic is of {main[:80]!r}: leave model_set "
            "out, or name the same set"
        )
    return main


def _check_function_name(name: str | None) -> str | None:
    """Return it; ValueError: no name of a function in a module. Nothing is imported here."""
    module, _, function = (name or "").partition(":")
    if name is not None and not all(map(str.isidentifier, (*module.split("."), function))):
        raise ValueError(f"{name[:80]!r} names no function: give package.module:function")
    return name


# Fields of the settings. The check is outermost, so that its errors name the field alone.
CachePlace = Annotated[str, AfterValidator(_check_cache)]
FunctionName = Annotated[str | None, AfterValidator(_check_function_name)]
FunctionNames = Annotated[
    tuple[Annotated[str, AfterValidator(_check_function_name)], ...],
    BeforeValidator(lambda names: names.split(",") if isinstance(names, str) else names),
]
Origins = Annotated[tuple[str, ...], AfterValidator(check_origins)]


def form_places(max_queued_images: int) -> int:
    """Return how many places of a member's queue requests of several images may fill.

    The rest, a quarter, is for single images: they go first, but not if there is no place to wait.
    """
    return max_queued_images - max_queued_images // 4


class QueueConfig(BaseModel):
    """``user_config`` of a member: what may change without a restart; null leaves it as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_batch_size: Annotated[int, Field(ge=1)] | None = None  # at most the largest compiled size
    max_queued_images: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def of(cls, content: object, max_files: int) -> Self:
        """Check a file's; ConfigError: a key or value that is none, or no room for forms."""
        try:
            asked = cls.model_validate(content)
            if asked.max_queued_images is not None:
                check_form_fits(asked.max_queued_images, max_files)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(("user_config", *map(str, first["loc"])))
            known = ", ".join(cls.model_fields)
            raise ConfigError(f"{where}: {first['msg']}; it has {known}") from error
        except ValueError as error:
            raise ConfigError(f"user_config: {error}") from error
        return asked


def check_fast_fits(fast: str, combine: str | None, weights: Mapping[str, float] | None) -> None:
    """Raise :class:`ValueError` if the setting ``fast`` asks for a plan that others forbid."""
    whys = {
        f"combine is {combine}": combine
        and "answers some images by a few members, without combine",
        "weights is set": weights and "is of the manifest's members and weights",
    }
    for key, why in whys.items():
        if why:
            raise ValueError(f"{key} and {fast} fast: a fast plan {why}; leave one of them out")


def check_form_fits(max_queued_images: int, max_files: int) -> None:
    """Raise ValueError if the queue of a member could never take a request of ``max_files``."""
    places = form_places(max_queued_images)
    if max_files > max(places, 1):
        least = next(n for n in count(max_files) if form_places(n) >= max_files)
        raise ValueError(
            f"max_files is {max_files}, and of max_queued_images {max_queued_images} a form may "
            f"fill {places}: larger ones would always be refused; raise max_queued_images to "
            f"{least}, or lower max_files"
        )


MIN_LENGTH = 24  # 144 bits of base64, 96 of hexadecimal: nobody tries them all
TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750, section 2.1: what "Bearer" may carry
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
UNNAMED = "unnamed"  # the metric's label for a key without a name
MAKE_ONE = "openssl rand -hex 32 makes one"
OPTIONS = "rate, burst, share, lane, sets and admin"
YAML_LIST = re.compile(r"-(\s|$)|\[|---")  # how the first line of the YAML form begins


class ApiKeyError(TandemError):
    """Keys that cannot be read, or that are none."""

    code = "api_key"


class KeyEntry(BaseModel):
    """A key with its name and its options, as a line or an entry of the key file has them."""

    # Values are in no message: one of them is a key.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    key: str
    name: str = UNNAMED
    rate: float | None = Field(None, gt=0, le=1e6)
    burst: float | None = Field(None, ge=1, le=1e6)
    share: float = Field(1.0, ge=0.01, le=100)
    lane: Literal["interactive", "bulk"] = "interactive"
    sets: frozenset[str] | None = Field(None, min_length=1)
    admin: bool | None = None  # None: only a key without options is one

    @field_validator("key", "name")
    @classmethod
    def _has_its_form(cls, text: str, of: ValidationInfo) -> str:
        if of.field_name == "name":
            if not NAME.fullmatch(text):
                raise ValueError("a key's name is 1 to 64 letters, digits and ._- before the colon")
        elif len(text) < MIN_LENGTH:
            length = f"a key of {len(text)} characters"
            raise ValueError(f"{length}, the least is {MIN_LENGTH}; {MAKE_ONE}")
        elif not TOKEN.fullmatch(text):
            raise ValueError(f"a key is letters, digits and ._~+/- with = at its end; {MAKE_ONE}")
        return text

    @property
    def options(self) -> dict[str, Any]:
        """The options that are there."""
        return self.model_dump(include=self.model_fields_set - {"key", "name"}, exclude_none=True)

    @classmethod
    def of(cls, place: str, fields: Any) -> "KeyEntry":
        """Check the fields of an entry; :class:`ApiKeyError` names ``place`` and the option."""
        try:
            entry = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            name = first["loc"][0] if first["loc"] else None
            if first["type"] == "value_error":
                text = str(first["ctx"]["error"])
            elif name in cls.model_fields:
                text = f"{name}: {first['msg']}"
            else:  # what stands there may be a key
                text = f"an entry is key, name and the options {OPTIONS}; this has something else"
            raise ApiKeyError(f"{place}: {text}") from None
        if entry.name == UNNAMED and entry.options:
            raise ApiKeyError(f"{place}: a key with options has a name, NAME:KEY:OPTIONS")
        if entry.burst is not None and entry.rate is None:
            raise ApiKeyError(f"{place}: burst is there and rate is not; give both")
        return entry


def keys_in(text: str, where: str) -> list[KeyEntry]:
    """Return the keys of ``text``; # begins a comment.

    A line is ``KEY``, ``NAME:KEY`` or ``NAME:KEY:OPTIONS``, such as ``rate=50,sets=a|b,admin``. Or
    the text is a list of mappings in YAML, with the options as keys.

    Raises:
        ApiKeyError: no key, one that is too short or has other characters, a name that is none, or
            an option that is none; named by its line or its place in the list.
    """
    numbered = ((num, line.strip()) for num, line in enumerate(text.splitlines(), 1))
    lines = [(num, line) for num, line in numbered if line and not line.startswith("#")]
    if lines and YAML_LIST.match(lines[0][1]):
        entries = _entries_of_yaml(text, where)
    else:
        entries = [KeyEntry.of(f"{where}, line {num}", fields_of(line)) for num, line in lines]
    if not entries:
        raise ApiKeyError(f"{where} holds no key; {MAKE_ONE}, one a line")
    options: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if options.setdefault(entry.name, entry.options) != entry.options:
            raise ApiKeyError(f"{where}: the keys named {entry.name} differ in their options")
    return entries


def fields_of(line: str) -> dict[str, Any]:
    """Return the fields of an entry in a line; admin without a value is true."""
    name, *rest = line.split(":", 2)
    if not rest:
        return {"key": name}
    fields: dict[str, Any] = {"name": name, "key": rest[0]}
    for option in rest[1].split(",") if len(rest) > 1 else ():
        title, _, value = (part.strip() for part in option.partition("="))
        fields[title] = value.split("|") if title == "sets" and value else value
        if title == "admin" and not value:
            fields[title] = True
    return fields


def _entries_of_yaml(text: str, where: str) -> list[KeyEntry]:
    try:
        rows = parse_yaml(text, where)
    except YamlError as error:  # its message quotes the line, which may hold a key
        mark = getattr(error.__cause__, "problem_mark", None)
        at = f"{where}, line {mark.line + 1}" if mark else where
        raise ApiKeyError(f"{at}: this is not YAML") from None
    if not isinstance(rows, list):
        raise ApiKeyError(f"{where}: keys in YAML are a list of mappings, each with key and name")
    return [KeyEntry.of(f"{where}, entry {number}", row) for number, row in enumerate(rows, 1)]
