"""``tandem classify-offline --address``: Ray Data classifies files on the nodes of a cluster.

A process on a node runs Ray Data, which no client by ray:// can. Rows come to the command as JSON:
it keeps and shows them as it does its own.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from app.errors import ConfigError, NotReadyError
from models.ensemble import PlanName
from models.errors import TandemError
from models.image_files import file_stamps, first_not_utf8, images_at, is_store, read_image
from models.machine import check_installed
from models.manifest import Manifest
from models.model_set import load_model_set, offline_precision
from models.record import Precision

if TYPE_CHECKING:
    import pyarrow

CORES = 4  # of a process that classifies, at most: more cores are more processes
FILES_A_BLOCK = 128  # what a process gets at a time
READERS = 16  # files that a task reads at a time
WHOLE: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow"}  # blocks as they are
Row = dict[str, Any]


class ClusterRows:
    """Classifies on the cluster to which Ray is connected.

    Raises:
        ConfigError: no node has CPUs, or one lacks Tandem, a package or the set; or they differ.
    """

    def __init__(
        self, model_set: str, plan: PlanName = "full", embedding: str | None = None
    ) -> None:
        """Load the set on every node with CPUs, and check that all have the same version."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        self._nodes = [node for node in alive if node["Resources"].get("CPU", 0) >= 1]
        if not self._nodes:
            raise ConfigError("the Ray cluster has no node with a CPU; start one: ray start")
        cpus = [int(node["Resources"]["CPU"]) for node in self._nodes]
        self._cores = min(CORES, *cpus)  # as many as fit every node
        self._pool = sum(count // self._cores for count in cpus)
        pending = [_on_node(node, _inspected, model_set) for node in self._nodes]
        held = [_answer(node, answer) for node, answer in zip(self._nodes, pending, strict=True)]
        self.manifest = held[0][1]
        if len(versions := sorted({version for version, _ in held})) > 1:
            raise ConfigError(
                f"the nodes have {model_set} in versions {', '.join(versions)}; copy one to all"
            )
        precision = offline_precision(self.manifest)
        self.model_version = self.manifest.fingerprint(precision)
        self._set, self._embedding = (model_set, self._cores, plan, precision), embedding

    def find(self, paths: list[str]) -> list[str]:
        """Return the names of all images at URLs and paths, as a node sees them.

        Raises :class:`ConfigError` if a name is not UTF-8, as text in Ray Data's blocks is.
        """
        names = list(_answer(self._nodes[0], _on_node(self._nodes[0], _file_names, paths)))
        if (name := first_not_utf8(names)) is not None:
            raise ConfigError(
                f"the name {name!r} is not UTF-8; rename the file, or classify without --address"
            )
        return names

    def stamps(self, files: list[str]) -> list[tuple[int, int] | None]:
        """Return the bytes and time of change of each file, as a node sees them."""
        node = self._nodes[0]
        return list(_answer(node, _on_node(node, file_stamps, files)))

    def rows(self, files: list[str], top_k: int, threshold: float | None) -> Iterator[Row]:
        """Yield one row a file, in the order in which they are done."""
        import ray

        if not files:
            return
        asked = (*self._set, top_k, threshold, self._embedding)
        try:
            runs = _only_on(self._nodes[0], Driver).remote(files, asked, self._pool)
            pending = runs.next.remote()
            while (lines := ray.get(pending)) is not None:
                pending = runs.next.remote()  # while these are kept
                yield from map(json.loads, lines)
        except ray.exceptions.RayError as error:
            kept = "what was kept stays, and the same command goes on"
            raise NotReadyError(f"the cluster stopped: {_reason(error)}; {kept}") from error


class Driver:
    """Runs Ray Data: tasks read the files, and processes with the networks classify them.

    Reading takes no CPU of Ray's: the networks have them all.
    """

    def __init__(self, files: list[str], asked: tuple[Any, ...], pool: int) -> None:
        import pyarrow
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        starts = range(0, len(files), FILES_A_BLOCK)
        blocks = [pyarrow.table({"file": files[at : at + FILES_A_BLOCK]}) for at in starts]
        of_pool = WHOLE | {"compute": ray.data.ActorPoolStrategy(size=pool)}
        rows = (
            ray.data.from_arrow(blocks)
            .map_batches(_read, num_cpus=0, concurrency=2 * pool, **WHOLE)
            .map_batches(NodeClassifier, fn_constructor_args=asked, num_cpus=asked[1], **of_pool)
        )
        self._batches: Iterator[Any] = iter(rows.iter_batches(**WHOLE))

    def next(self) -> list[str] | None:
        """Return some rows, each as JSON; None: there are no more."""
        batch = next(self._batches, None)
        return None if batch is None else batch["row"].to_pylist()


class NodeClassifier:
    """Loads the networks once in a process, for some of its node's cores."""

    def __init__(
        self,
        model_set: str,
        cores: int,
        plan: PlanName,
        precision: Precision,
        top_k: int,
        threshold: float | None,
        embedding: str | None = None,
    ) -> None:
        (entry,) = entry_points(group="tandem.offline", name="rows")
        self._source = entry.load()(model_set, cores, plan, precision, embedding)
        self._asked = top_k, threshold

    def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        """Take the columns file, content and error; return row, as JSON."""
        import pyarrow

        files, contents, errors = (batch[name].to_pylist() for name in batch.column_names)
        read = [
            OSError(error) if content is None else content
            for content, error in zip(contents, errors, strict=True)
        ]
        rows = self._source.rows(files, *self._asked, read)
        return pyarrow.table({"row": [json.dumps(row) for row in rows]})


def _read(batch: "pyarrow.Table") -> Iterator["pyarrow.Table"]:
    """Yield parts of the column file, with content and error, of which one is null."""
    import pyarrow

    with ThreadPoolExecutor(READERS) as pool:
        for first in range(0, len(batch), READERS):  # large photos: Ray cuts a block between them
            files = batch["file"][first : first + READERS].to_pylist()
            contents, errors = zip(*pool.map(_content, files), strict=True)
            photos = pyarrow.array(contents, pyarrow.large_binary())
            columns = [pyarrow.array(files), photos, pyarrow.array(errors, "string")]
            yield pyarrow.table(columns, ["file", "content", "error"])


def _content(file: str) -> tuple[bytes | None, str | None]:
    try:
        return read_image(file), None
    except OSError as error:
        return None, str(error)


def _inspected(model_set: str) -> tuple[str, Manifest]:
    for package in ("pandas", "pyarrow"):  # Ray Data's
        check_installed(package, "ray-data", "tandem classify-offline --address")
    manifest = load_model_set(model_set).manifest
    return " ".join(manifest.fingerprints.values()), manifest


def _file_names(paths: list[str]) -> list[str]:
    from app.bench.load import find_files

    names = (images_at(path) if is_store(path) else map(str, find_files([path])) for path in paths)
    return list(dict.fromkeys(name for some in names for name in some))


def _on_node(node: Row, function: Callable[..., Any], argument: object) -> Any:
    """Call a function on this very node; return the reference for :func:`_answer`."""
    return _only_on(node, _said).remote(function, argument)


def _said(function: Callable[..., Any], argument: object) -> tuple[Any, str | None]:
    """Return the result, or what an error of ours says."""
    try:
        return function(argument), None
    except TandemError as error:
        return None, error.message


def _answer(node: Row, reference: Any) -> Any:
    import ray

    try:
        result, problem = ray.get(reference)
    except ray.exceptions.RayError as error:  # Tandem itself is not there
        problem = f"{_reason(error)}; install Tandem there, in the same version"
    if problem:
        raise ConfigError(f"node {node['NodeManagerAddress']}: {problem}")
    return result


def _only_on(node: Row, function: Callable[..., Any]) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(function).options(num_cpus=0, scheduling_strategy=where)


def _reason(error: Exception) -> str:
    """Return the last line of what Ray says, which is the cause."""
    return str(error).strip().splitlines()[-1]
