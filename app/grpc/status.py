"""Maps HTTP statuses, which the application counts in, to gRPC status codes."""

import grpc

# 413 is not RESOURCE_EXHAUSTED, which clients are told to try again: the same bytes stay too many.
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
OK = 200


def code_of(status: int) -> grpc.StatusCode:
    """Return the gRPC status for an HTTP one; INTERNAL for what nobody should see."""
    return grpc.StatusCode.OK if status == OK else CODES.get(status, grpc.StatusCode.INTERNAL)


def number_of(status: int) -> int:
    """Return :func:`code_of`'s number, as it travels."""
    return int(code_of(status).value[0])
