"""Images in a local S3: listed, and what cannot be."""

from collections.abc import Iterator

import boto3
import pytest

from models.image_files import images_at, is_store, opened_store, read_image
from models.image_formats import KINDS
from models.machine import MissingExtraError
from models.stores import StoreError
from tests.support.s3_server import local_s3

KEYS = (
    "in/b.jpg",
    "in/a #1%.PNG",
    "in/deep/c.webp",
    "in/readme.txt",
    "in/.hidden/d.jpg",
    "e.jpg",
    "docs/a.md",
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch, local_s3(patch) as url:
        for key in KEYS:
            boto3.client("s3").put_object(Bucket=url.removeprefix("s3://"), Key=key, Body=key)
        yield url


@pytest.mark.parametrize("end", ["", "/"])
def test_images_below_a_folder(bucket: str, end: str) -> None:
    names = ("a #1%.PNG", "b.jpg", "deep/c.webp")
    assert images_at(f"{bucket}/in{end}") == [f"{bucket}/in/{name}" for name in names]


def test_a_whole_bucket(bucket: str) -> None:
    assert f"{bucket}/e.jpg" in images_at(bucket)


def test_an_object(bucket: str) -> None:
    assert images_at(f"{bucket}/in/readme.txt") == [f"{bucket}/in/readme.txt"]


def test_an_object_is_read(bucket: str) -> None:
    assert read_image(f"{bucket}/in/a #1%.PNG") == b"in/a #1%.PNG"
    with pytest.raises(OSError, match="in/none"):
        read_image(f"{bucket}/in/none")


@pytest.mark.parametrize(
    ("place", "told"), [("in/none", "cannot list .*in/none"), ("docs", f"no {KINDS} in")]
)
def test_nothing_there(bucket: str, place: str, told: str) -> None:
    with pytest.raises(StoreError, match=told):
        images_at(f"{bucket}/{place}")


def test_no_such_bucket(bucket: str) -> None:
    with pytest.raises(StoreError, match="cannot list s3://absent-bucket/in"):
        images_at("s3://absent-bucket/in")


def test_no_such_kind_of_store() -> None:
    with pytest.raises(StoreError, match=r"cannot open ftp://host/in: .*write s3://BUCKET/FOLDER"):
        images_at("ftp://host/in")


def test_a_path_is_no_store() -> None:
    assert not is_store("photos/in")
    assert is_store("s3://bucket/in")


def test_without_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow.*tandem-serve\[parquet\]"):
        opened_store("s3://bucket/in")
