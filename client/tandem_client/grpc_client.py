"""The blocking client over gRPC, ``tandem.v1.Ensemble``.

``pip install 'tandem-serve-client[grpc]'`` installs its dependencies.
"""

import time
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from tandem_client.answers import (
    BadAnswer,
    BadRequest,
    Outcome,
    TandemError,
    Unreachable,
    error_of,
    outcome_of,
)
from tandem_client.client import BlockingClient
from tandem_client.exchange import Attempts, Options, RetryPolicy, Tls, is_loopback
from tandem_client.images import Call, CallOptions, shorter_side
from tandem_client.tandem_pb2 import ClassifyReply, ClassifyRequest, Region

METHOD = "/tandem.v1.Ensemble/Classify"
# HTTP's statuses of the service's own codes, where gRPC has one status for several.
CODE_STATUSES = {
    "slow_body": 408,
    "too_many_bytes": 413,
    "too_many_files": 413,
    "unsupported_format": 415,
    "bad_parameter": 422,
    "too_many_pixels": 422,
}
# Messages have no limit, for forms of many images; the service has its own (max_body_bytes). This
# client retries by itself, within a call's time, so grpcio's retries are off. grpcio reconnects
# between attempts: its default waits are 1 s, then up to 120 s.
CHANNEL = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
# By gRPC's status, HTTP's. It determines the error if its code is unknown, or if it has none: then
# it is from HAProxy or grpcio.
STATUSES = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
}


class GrpcClient(BlockingClient):
    """Calls a service over an HTTP/2 connection; any number of threads may share it.

    Args:
        target: HOST:PORT of ``tandem serve --grpc-port``.
        api_key: for a service that requires one. Without ``tls`` it is sent unencrypted.
        timeout: seconds for a call with all its attempts; also sent to the service.
        retry: how often, and after which errors, a call is repeated.
        tls: files; None: no encryption.
        allow_degraded: whether to return answers of fewer members than were asked.
        shrink_to: the shorter side of pictures sent with ``shrink=True``, px; best twice the
            network's side.
    """

    def __init__(
        self,
        target: str = "127.0.0.1:9000",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        retry: RetryPolicy | None = None,
        tls: Tls | None = None,
        allow_degraded: bool = True,
        shrink_to: int = shorter_side(None),
    ) -> None:
        if shrink_to < 1:
            raise ValueError(f"shrink_to is {shrink_to}: give 1 px or more")
        self._shrink_to = shrink_to
        self._options = Options(
            target, api_key, timeout, retry or RetryPolicy(), tls, allow_degraded
        )
        channel = [*CHANNEL, ("grpc.enable_http_proxy", int(not is_loopback(target)))]
        if tls is None:
            self._channel = grpc.insecure_channel(target, channel)
        else:
            credentials = grpc.ssl_channel_credentials(*tls.pem())
            self._channel = grpc.secure_channel(target, credentials, channel)
        self._method = self._channel.unary_unary(
            METHOD,
            request_serializer=ClassifyRequest.SerializeToString,
            response_deserializer=ClassifyReply.FromString,
        )
        self._now, self._sleep = time.monotonic, time.sleep

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _shorter(self, options: CallOptions) -> int | None:
        return self._shrink_to if options.shrink else None

    def _ask(self, call: Call) -> list[Outcome]:
        if not call.num_results:
            return []
        attempts = Attempts.of(self._options, call.options.timeout, self._now)
        request = _request(call)
        while True:
            left_s = attempts.begin()
            metadata = _metadata(self._options, call, left_s)
            try:
                reply = self._method(request, timeout=left_s, metadata=metadata)
                return _outcomes(reply, call.num_results, self._options)
            except grpc.RpcError as error:
                failed = _failure(error, attempts, self._options)
                failed.__cause__ = error
                wait_s = attempts.wait_s(failed)
            self._sleep(wait_s)


def _request(call: Call) -> ClassifyRequest:
    """Return a call's message.

    Raises :class:`BadRequest` if a parameter has a value that the message cannot carry.
    """
    files = [file.data for file in call.files]
    try:
        regions = [Region(x=x, y=y, width=w, height=h) for x, y, w, h in call.options.boxes or ()]
        return ClassifyRequest(images=files, regions=regions, **call.options.query or {})
    except (TypeError, ValueError) as error:  # protobuf's own
        raise BadRequest(f"a parameter cannot be sent: {error}", "bad_parameter") from error


def _metadata(options: Options, call: Call, left_s: float) -> list[tuple[str, str]]:
    metadata = options.key_headers | call.headers(left_s)
    name = call.options.model_set
    if name is not None and name.isascii() and name.isprintable():
        metadata["model-set"] = name
    return list(metadata.items())


def _outcomes(reply: ClassifyReply, num_images: int, options: Options) -> list[Outcome]:
    answer: dict[str, Any] = MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    try:
        rows = answer["results"]
        if len(rows) == num_images:
            return [outcome_of(row.get("classified") or row) for row in rows]
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    raise BadAnswer(f"{options.shown_url} answered, but not as Tandem does", "bad_answer")


def _failure(error: grpc.RpcError, attempts: Attempts, options: Options) -> TandemError:
    """Return the error for a call that failed as a whole.

    Without ``error-code`` it is not the application's, but the connection's or a proxy's.
    """
    status, trailing = error.code(), dict(error.trailing_metadata() or ())
    fields = {"code": trailing.get("error-code"), "message": error.details()}
    http_status = CODE_STATUSES.get(str(fields["code"]), STATUSES.get(status))
    if fields["code"] is not None:
        fields["request_id"] = trailing.get("request_id")
    elif status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return attempts.exceeded()
    elif status is grpc.StatusCode.UNAVAILABLE:
        return Unreachable(f"no answer from {options.shown_url} ({error.details()})", "refused")
    else:
        fields["code"], http_status = f"grpc_{status.name.lower()}", http_status or 500
    # gRPC's equivalent of Retry-After (gRPC proposal A6), in ms.
    wait = str(trailing.get("grpc-retry-pushback-ms", ""))
    retry_after_s = int(wait[:9]) / 1000 if wait.isascii() and wait.isdecimal() else None
    return error_of(fields, http_status, retry_after_s)
