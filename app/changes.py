"""What each route and gRPC method changes, and who may ask for it: one rule for all of them.

Header names are lower-case here, and gRPC's metadata are headers.
"""

import ipaddress
from collections.abc import Callable, Iterable
from typing import NamedTuple

from app.access import Caller
from app.environment import is_on_loopback
from app.errors import MAX_SHOWN, NotLocalError


class Change(NamedTuple):
    """What a route changes, and who may ask for it.

    A service with keys has checked one. On a service without, pages of other sites may not; with
    ``pages`` those of ``allowed_origins`` may. If it listens on loopback, only programs on this
    machine may. With ``here`` that holds on every service, and with a key too.
    """

    what: str
    pages: bool = False
    here: bool = False


OIP = "inference.GRPCInferenceService"
_SYSTEM, _REPOSITORY = "POST /v2/systemsharedmemory", "POST /v2/repository/models/{model_name}"
MEMORY, LOADED = Change("the regions of shared memory", here=True), Change("the loaded sets")
CHANGES = {
    "PUT /v1/traffic": Change("the traffic between versions"),
    "POST /v1/feedback": Change("the book of feedback", pages=True),
    "POST /v1/teach": Change("the photographs that are taught", pages=True),
    "DELETE /v1/samples/{sample_id}": Change("the samples that are kept"),
    f"{_REPOSITORY}/load": LOADED,
    f"{_REPOSITORY}/unload": LOADED,
    f"{OIP} RepositoryModelLoad": LOADED,
    f"{OIP} RepositoryModelUnload": LOADED,
    f"{_SYSTEM}/region/{{region_name}}/register": MEMORY,
    f"{_SYSTEM}/region/{{region_name}}/unregister": MEMORY,
    f"{_SYSTEM}/unregister": MEMORY,
    f"{OIP} SystemSharedMemoryRegister": MEMORY,
    f"{OIP} SystemSharedMemoryUnregister": MEMORY,
}
# Routes that change nothing for others. Classifying counts in metrics, and an operator may keep
# samples of it: no answer to others depends on that. There is no CUDA memory to change.
_NAME = ["/v2/models/{model_name}", "/v2/models/{model_name}/versions/{model_version}"]
_V1 = ["/v1/models/{model_name}", "/v1/models/{model_name}/versions/{model_version}"]
_CUDA = ["/v2/cudasharedmemory", "/v2/cudasharedmemory/region/{region_name}"]
READS = {
    "POST": "/v1/classify /invocations /v2/repository/index "
    + "".join(f"{name} {name}:predict " for name in _V1)
    + " ".join([f"{_CUDA[1]}/register", *(f"{p}/unregister" for p in _CUDA)])
    + "".join(f" {name}/infer" for name in _NAME),
    "GET": "/ /docs /openapi.json /page/{name} /docs/assets/{name} /healthz /readyz /ping /v2 "
    "/v2/health/live /v2/health/ready /v2/models/stats /v1/models "
    "/v1/feedback /v1/keys /v1/teach /v1/traffic /v2/systemsharedmemory/status "
    "/v2/systemsharedmemory/region/{region_name}/status "
    + " ".join(f"{path}/status" for path in _CUDA)
    + "".join(f" {name} {name}/metadata" for name in _V1)
    + "".join(f" {name} {name}/config {name}/ready {name}/stats" for name in _NAME),
    "OPTIONS": "/",
    OIP: "ServerLive ServerReady ServerMetadata ModelReady ModelMetadata ModelConfig "
    "ModelInfer ModelStatistics RepositoryIndex SystemSharedMemoryStatus CudaSharedMemoryStatus "
    "CudaSharedMemoryRegister CudaSharedMemoryUnregister",
    "tensorflow.serving.PredictionService": "Predict GetModelMetadata",
    "tensorflow.serving.ModelService": "GetModelStatus",
    "tandem.v1.Ensemble": "Classify",
    "grpc.health.v1.Health": "Check",
}
# Every route and method, by "VERB PATH" or "SERVICE METHOD". None: it changes nothing.
ROUTES: dict[str, Change | None] = {
    **CHANGES,
    **{f"{kind} {name}": None for kind, names in READS.items() for name in names.split()},
}
# What proxies add; some add one of these alone. Two name the client.
OF_CLIENTS = ("x-forwarded-for", "x-real-ip")
OF_PROXIES = ("forwarded", "via", "x-forwarded-host", *OF_CLIENTS)
OTHER_SITES = ("cross-site", "same-site")  # as browsers say, also where they send no origin
UNLISTED = Change("a route that is not in the table", here=True)  # a test finds these


class Sender(NamedTuple):
    """Who asks, by the connection and the headers.

    Args:
        is_here: whether the connection comes from this machine. Behind HAProxy it is HAProxy's,
            which then listens on loopback (:mod:`app.launch.haproxy`).
        header: returns a header's values, joined by commas, or None.
    """

    is_here: bool
    header: Callable[[str], str | None]

    @property
    def is_local(self) -> bool:
        """Whether a program on this machine asks for itself, or a page of the service does."""
        return self.is_here and self.foreign() is None

    def foreign_page(self, origins: Iterable[str] = ()) -> str | None:
        """Return the Origin of another site's page, unless ``origins`` have it; else None."""
        origin = self.header("origin")
        if origin is None and (site := self.header("sec-fetch-site")) in OTHER_SITES:
            return f"Sec-Fetch-Site {site}"
        if origin is None or origin in origins or "*" in origins:
            return None
        host = self.header("host")
        return None if host and origin.partition("://")[2] == host else f"Origin {origin}"

    def foreign(self, origins: Iterable[str] = ()) -> str | None:
        """Return the header by which the request was made for somebody else; None if none says so.

        A page has an origin. It may have made this machine's address that of its own name, which is
        then the Host. A proxy names the client for which it forwards.
        """
        if page := self.foreign_page(origins):
            return page
        if (host := self.header("host")) and not _is_own_host(host):
            return f"Host {host}"
        for name in OF_PROXIES:
            if (value := self.header(name)) is not None and not (
                name in OF_CLIENTS and all(is_loopback(part.strip()) for part in value.split(","))
            ):
                return f"{name.title()} {value}"
        return None


def check_change(
    route: str, sender: Sender, caller: Caller, *, has_keys: bool, origins: Iterable[str]
) -> None:
    """Raise an error unless who asks may change what ``route`` changes.

    Args:
        route: as :data:`ROUTES` names it.
        sender: who asks, by the connection.
        caller: who asks, by an accepted key if the service has keys.
        has_keys: whether the service has keys.
        origins: the setting ``allowed_origins``.

    Raises:
        ForbiddenError: the key may not change the service.
        NotLocalError: who asks is not on this machine, or asks for somebody else.
    """
    if (change := ROUTES.get(route, UNLISTED)) is None:
        return
    caller.check_admin()
    if has_keys and not change.here:
        return
    allowed = tuple(origins) if change.pages else ()
    if change.here or is_on_loopback():
        foreign = sender.foreign(allowed) if sender.is_here else "the address of the connection"
    else:
        foreign = sender.foreign_page(allowed)
    if foreign is not None:
        remedy = "give the service keys (api_keys_file) to let others"
        if change.here:
            remedy = "call it from there, without a proxy"
        raise NotLocalError(
            f"{change.what}: only programs on the service's own machine that call it directly may "
            f"change this, and {foreign[: 2 * MAX_SHOWN]!r} says otherwise; {remedy}"
        )


def _is_own_host(host: str) -> bool:
    """Whether a Host header names this machine's loopback."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    name = name.lower().rstrip(".")
    return name == "localhost" or name.endswith(".localhost") or is_loopback(name.strip("[]"))


def is_loopback(address: str) -> bool:
    """Whether ``address`` is a loopback IP address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
