"""A client of ``grpc.reflection.v1``: grpcio's own, which knows v1alpha, under the other name."""

import grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

V1 = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"


class _AsV1(grpc.StreamStreamClientInterceptor):
    """Calls the method of v1 in place of v1alpha's; their messages are the same on the wire."""

    def intercept_stream_stream(self, continuation, details, requests):
        return continuation(details._replace(method=V1), requests)


def reflection_v1(channel: grpc.Channel) -> ProtoReflectionDescriptorDatabase:
    """Return what a server describes of itself, asked for by v1 alone."""
    return ProtoReflectionDescriptorDatabase(grpc.intercept_channel(channel, _AsV1()))
