"""Pooled features of photographs and their mirrors, computed once and kept on disk.

Features belong to a network's weights, its image rule, the runtime and the CPU. Each network has a
file of records in a folder of the user's cache: the photograph's sha256, its features, and those of
its mirror. Records are added as they are computed, so an interrupted run goes on where it ended; a
record that was cut short is dropped. Where photographs lie is noted there too, so that a set
can be learned again on another network.
"""

import fcntl
import hashlib
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov

from calibration.evaluation.inference import BATCH, batches, least_cpu_ms, through_threads
from calibration.learning.photographs import Photograph
from calibration.sets.transaction import writing
from models.errors import ImageError, ModelSetError
from models.files import make_folder, write_whole
from models.image import ImageInputs
from models.machine import available_cpus, cpu_model
from models.model_set import ModelSet
from models.network import Pixels, RuntimeOptions
from models.openvino_network import CompiledNetwork, features_network, read_network
from models.record import Precision

Features = npt.NDArray[np.float32]  # (N, 2, F): of each photograph and its mirror
Track = Callable[[Iterable[Sequence[Photograph]], int], Iterable[Sequence[Photograph]]]
Network = tuple[str, Precision]
VIEWS = 2
PLACES_NAME = "places.tsv"


@dataclass(frozen=True)
class Facts:
    """What an accuracy record says of a network, besides its accuracy."""

    cpu_ms: float  # per image
    kernels: tuple[str, ...]
    float_type: str


@dataclass(frozen=True)
class Backbone:
    """A network of a set up to its pooled features."""

    whole: ov.Model
    features: ov.Model
    options: RuntimeOptions
    key: str  # of all that its features depend on, besides the photograph

    @property
    def num_features(self) -> int:
        """The length of a photograph's vector."""
        return int(self.features.output().partial_shape[1].get_length())


def backbones_of(model_set: ModelSet) -> dict[Network, Backbone]:
    """Cut every network of a set at its pooled features.

    Raises :class:`ModelSetError` if one has no place to cut.
    """
    cut = dict[Network, Backbone]()
    threads, manifest = available_cpus(), model_set.manifest
    absent = model_set.absent_precisions
    for member in manifest.members:
        for precision in member.networks:
            if precision in absent:
                continue
            path = model_set.network_path(member.name, precision)
            network = read_network(path)
            float_type = "f32" if precision == "FP16" else manifest.float_type
            options = RuntimeOptions(threads, (BATCH,), threads, float_type)
            image = manifest.image_of(member.name)
            features = features_network(network, f"{model_set.name}'s {path.name}")
            parts = (_weights_digest(features), image.key, float_type, ov.__version__, cpu_model())
            key = hashlib.sha256("\n".join((*parts, platform.machine())).encode()).hexdigest()[:32]
            cut[member.name, precision] = Backbone(network, features, options, key)
    return cut


def _weights_digest(features: ov.Model) -> str:
    """Return a hash of a network's weights before the cut, whatever its file and names are."""
    digests = (
        hashlib.sha256(np.asarray(node.data).tobytes()).hexdigest()
        for node in features.get_ordered_ops()
        if node.get_type_name() == "Constant" and node.data.size > 8  # not axes and shapes
    )
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


class FeatureCache:
    """The features and facts of networks in a folder, and where photographs lie."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with writing(folder):
            make_folder(folder)

    def index(self, backbone: Backbone) -> dict[str, int]:
        """Return the place of each photograph whose features are kept, by its sha256."""
        records = self._records(backbone)
        return {bytes(sha256).hex(): place for place, sha256 in enumerate(records["sha256"])}

    def features(self, backbone: Backbone, sha256s: Sequence[str]) -> Features:
        """Return kept features, (N, 2, F)."""
        places = self.index(backbone)
        features: Features = self._records(backbone)["views"][[places[s] for s in sha256s]]
        return features

    def add(self, backbone: Backbone, sha256s: Sequence[str], views: Features) -> None:
        """Keep the features of photographs, (N, 2, F)."""
        records = np.zeros(len(sha256s), _kind(backbone))
        records["sha256"] = [list(bytes.fromhex(sha256)) for sha256 in sha256s]
        records["views"] = views
        path = self._path(backbone)
        with writing(path), path.open("ab") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)  # of another command
            opened.truncate(opened.tell() - opened.tell() % records.itemsize)
            opened.write(records.tobytes())

    def facts(self, backbone: Backbone) -> Facts | None:
        """Return the kept facts of a network."""
        try:
            content = json.loads(self._path(backbone, ".json").read_text("utf-8"))
            return Facts(content["cpu_ms"], tuple(content["kernels"]), content["float_type"])
        except (OSError, ValueError, KeyError):
            return None

    def keep_facts(self, backbone: Backbone, facts: Facts) -> None:
        """Keep the facts of a network."""
        path = self._path(backbone, ".json")
        with writing(path):
            write_whole(path, json.dumps(facts.__dict__) + "\n")

    def placed(self, photographs: Sequence[Photograph]) -> list[Photograph]:
        """Return photographs with the paths that are known of them, and note new ones."""
        path = self.folder / PLACES_NAME
        known = dict[str, str]()
        if path.exists():
            lines = path.read_text("utf-8", "surrogateescape").splitlines()
            known = dict(line.split("\t", 1) for line in lines if "\t" in line)
        now = {p.sha256: str(p.path.absolute()) for p in photographs if p.path is not None}
        new = {sha256: at for sha256, at in now.items() if known.get(sha256) != at}
        if new:
            lines = [f"{sha256}\t{at}\n" for sha256, at in new.items() if "\n" not in at]
            with writing(path), path.open("a", encoding="utf-8", errors="surrogateescape") as out:
                out.write("".join(lines))
        known |= now
        return [
            p
            if p.path is not None or p.sha256 not in known
            else replace(p, path=Path(known[p.sha256]))
            for p in photographs
        ]

    def _records(self, backbone: Backbone) -> npt.NDArray[np.void]:
        path, kind = self._path(backbone), _kind(backbone)
        number = path.stat().st_size // kind.itemsize if path.exists() else 0
        if not number:
            return np.zeros(0, kind)
        return np.memmap(path, kind, "r", shape=(number,))

    def _path(self, backbone: Backbone, suffix: str = ".features") -> Path:
        return self.folder / f"{backbone.key}{suffix}"


def _kind(backbone: Backbone) -> np.dtype[np.void]:
    views = ("views", "<f4", (VIEWS, backbone.num_features))
    return np.dtype([("sha256", "u1", (32,)), views])


def compute(
    backbones: dict[Network, Backbone],
    photographs: Sequence[Photograph],
    inputs: ImageInputs,
    cache: FeatureCache,
    track: Track,
) -> tuple[list[Photograph], list[str]]:
    """Compute the features that are not kept; return the photographs that have them.

    Also returns the unreadable ones, each with the reason. ``track`` wraps the batches, for a
    progress bar.
    """
    known = {name: cache.index(backbone) for name, backbone in backbones.items()}
    lacking = {name: {p.sha256 for p in photographs} - set(known[name]) for name in backbones}
    missing = [p for p in photographs if any(p.sha256 in of for of in lacking.values())]
    needed = [n for n, b in backbones.items() if lacking[n] or cache.facts(b) is None]
    networks = {name: _compiled(backbones[name]) for name in needed}
    _keep_facts(backbones, networks, cache)

    def work(batch: Sequence[Photograph]) -> _Computed:
        return _computed(batch, networks, inputs)

    unreadable = dict[str, str]()
    threads = available_cpus()
    for done in through_threads(work, track(batches(missing), len(missing)), threads):
        unreadable |= done.unreadable
        for name, views in done.views.items():
            new = [n for n, sha256 in enumerate(done.sha256s) if sha256 in lacking[name]]
            cache.add(backbones[name], [done.sha256s[n] for n in new], views[new])
    readable = [p for p in photographs if p.sha256 not in unreadable]
    return readable, list(unreadable.values())


@dataclass
class _Computed:
    sha256s: list[str]
    views: dict[Network, Features]
    unreadable: dict[str, str]  # by hash


def _computed(
    batch: Sequence[Photograph], networks: dict[Network, CompiledNetwork], inputs: ImageInputs
) -> _Computed:
    done, pixels = _Computed([], {}, {}), list[Pixels]()
    for photograph in batch:
        try:
            pixels.append(_read(photograph, inputs))
            done.sha256s.append(photograph.sha256)
        except (ImageError, OSError) as error:
            text = error.message if isinstance(error, ImageError) else error.strerror
            done.unreadable[photograph.sha256] = f"{photograph.path or photograph.name}: {text}"
    if pixels:
        images = np.stack(pixels)
        for (member, precision), network in networks.items():
            own = inputs.of(member, images)
            mirrored = np.ascontiguousarray(own[:, :, ::-1])
            views = np.stack([network.predict(own), network.predict(mirrored)], axis=1)
            if not np.isfinite(views).all():
                raise ModelSetError(
                    f"{member} {precision} answers NaN or infinity to a photograph: the network "
                    "is broken; convert or quantise it again"
                )
            done.views[member, precision] = views
    return done


def _read(photograph: Photograph, inputs: ImageInputs) -> Pixels:
    if photograph.pixels is not None:
        return photograph.pixels
    if photograph.path is None:
        raise FileNotFoundError(0, "its features are not kept, nor is known where it lies")
    data = photograph.path.read_bytes()
    if hashlib.sha256(data).hexdigest() != photograph.sha256:
        raise FileNotFoundError(0, "it is another file now, and its features are not kept")
    return inputs.read(data)


def _compiled(backbone: Backbone) -> CompiledNetwork:
    return CompiledNetwork(backbone.features, backbone.options)


def _keep_facts(
    backbones: dict[Network, Backbone],
    networks: dict[Network, CompiledNetwork],
    cache: FeatureCache,
) -> None:
    unknown = {n: of for n, of in networks.items() if cache.facts(backbones[n]) is None}
    for name, cpu_ms in least_cpu_ms(unknown).items():
        network = networks[name]
        cache.keep_facts(backbones[name], Facts(cpu_ms, network.kernels, network.float_type))
