"""Images in a local S3: listed, and what cannot be."""

import re
import sys

import boto3
import pytest

from models.image_files import images_at, is_store, opened_store, read_image
from models.image_formats import KINDS
from models.machine import MissingExtraError
from models.stores import StoreError
from tests.support.cases import cases
from tests.support.object_stores import local_s3

KEYS = ("in/b.jpg", "in/a #1%.PNG", "in/deep/c.webp", "in/readme.txt", "in/.hidden/d.jpg", "e.jpg")


@pytest.fixture(scope="module")
def bucket():
    with pytest.MonkeyPatch.context() as patch, local_s3(patch) as url:
        for key in (*KEYS, "docs/a.md"):
            boto3.client("s3").put_object(Bucket=url.removeprefix("s3://"), Key=key, Body=key)
        yield url


@pytest.mark.parametrize("end", ["", "/"])
def test_images_below_a_folder_of_a_whole_bucket_and_one_object(bucket: str, end: str) -> None:
    names = ("a #1%.PNG", "b.jpg", "deep/c.webp")
    assert images_at(f"{bucket}/in{end}") == [f"{bucket}/in/{name}" for name in names]
    assert f"{bucket}/e.jpg" in images_at(bucket)
    assert images_at(f"{bucket}/in/readme.txt") == [f"{bucket}/in/readme.txt"]
    assert read_image(f"{bucket}/in/a #1%.PNG") == b"in/a #1%.PNG"
    with pytest.raises(OSError, match="in/none"):
        read_image(f"{bucket}/in/none")


@cases(
    "place, says",
    ("BUCKET/in/none", "cannot list .*in/none"),
    ("BUCKET/docs", f"no {KINDS} in"),
    ("s3://absent-bucket/in", "cannot list s3://absent-bucket/in"),
    ("ftp://host/in", r"cannot open ftp://host/in: .*write s3://BUCKET/FOLDER"),
)
def test_nothing_there(bucket: str, place: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        images_at(re.sub("^BUCKET", bucket, place))


def test_a_path_is_no_store_and_a_store_needs_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [is_store(place) for place in ("photos/in", "s3://bucket/in")] == [False, True]
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)
    with pytest.raises(MissingExtraError, match=r"needs pyarrow.*tandem-serve\[parquet\]"):
        opened_store("s3://bucket/in")
