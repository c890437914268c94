"""An S3 on this machine, with a bucket of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ENDPOINT = "AWS_ENDPOINT_URL"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@contextmanager
def local_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start it, give this process its address and keys, and return the bucket's URL."""
    import boto3
    from moto.server import ThreadedMotoServer  # takes seconds to import

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv(ENDPOINT, f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    forget_session(monkeypatch)
    for name in KEYS:
        monkeypatch.setenv(name, "testing")
    bucket = f"bucket-{os.urandom(4).hex()}"  # moto's state is the process's
    boto3.client("s3").create_bucket(Bucket=bucket)
    yield f"s3://{bucket}"
    server.stop()


def forget_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have boto3 read its keys anew."""
    import boto3

    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
