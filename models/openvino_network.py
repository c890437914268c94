"""A compiled network: OpenVINO on the CPU, for a few fixed batch sizes.

DenseNet169 took 33 ms per image with a dynamic batch dimension, and 23 ms with static shapes (INT8,
one thread). So each size is compiled separately. The wheel uses TBB, which ignores OMP_NUM_THREADS
and cgroup quotas, and pins every process to the same first cores. So the number of threads is
always set, and pinning is off.

A network's pooled features are what the layer that scores its classes takes: the last one with
weights, a fully connected one (MatMul) or a 1 x 1 convolution. Its input is one vector an image, or
a map whose mean over rows and columns is one. Everything the image becomes must pass through that
layer: softmax, reshapes, rounding and a choice of classes may follow it. The graph of an INT8
network is searched alike; the features are then taken before they are rounded for that layer.
"""

import locale
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13 as ops

from models.ensemble import Probabilities
from models.errors import ModelSetError
from models.machine import give_back_memory
from models.network import LoadedNetwork, Outputs, Pixels, RuntimeOptions, check_image
from models.record import RuntimeName

__all__ = ["CompiledNetwork", "Pixels", "RuntimeOptions", "read_network"]


class KeptLocale:
    """A context manager that restores the process's locale from before the block.

    ``Core.compile_model`` (2026.4, with a compile cache) sets it to "C" for a moment. If threads do
    this at a time, the later one sees "C" and restores that. From then on ``open`` without an
    encoding, in Ray too, writes ASCII in place of UTF-8. If blocks overlap, the last one to end
    restores the locale that the first one saw.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_within = 0
        self._before = ""

    def __enter__(self) -> Self:
        with self._lock:
            if not self._num_within:
                self._before = locale.setlocale(locale.LC_ALL)
            self._num_within += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_within -= 1
            if not self._num_within:
                locale.setlocale(locale.LC_ALL, self._before)


kept_locale = KeptLocale()  # the locale belongs to the process


@cache
def _core() -> ov.Core:
    """Return the process's only Core.

    Each Core of OpenVINO 2026.4 gives its thread a signal stack. If a Core ends after a younger one
    was made, a freed stack stays in use, and the next signal (Ctrl-C) causes a segmentation fault.

    OpenVINO's Python binding makes a table of types at the first tensor. Two threads that do so
    together deadlock: one has the table's guard and waits for the GIL, the other the reverse. So
    the first tensor is made here, before any thread can run a network. Compiling makes no tensors,
    so several threads may compile.
    """
    core = ov.Core()
    _ = ov.Tensor(np.zeros(1, np.uint8), shared_memory=True).data
    return core


def last_line(error: Exception) -> str:
    """Return the last line of a library's error, or its kind if it has no text.

    OpenVINO's errors may quote names in a damaged file. If these names are not UTF-8, the Python
    binding raises UnicodeDecodeError instead of the error.
    """
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "replace")
    return (text.strip().splitlines() or [type(error).__name__])[-1].lstrip("- ")


def read_network(path: Path) -> ov.Model:
    """Read an IR or an ONNX file with the process's Core.

    Raises :class:`ModelSetError` if OpenVINO cannot read the file.
    """
    try:
        return _core().read_model(path)
    except (RuntimeError, UnicodeDecodeError) as error:
        raise ModelSetError(f"OpenVINO cannot read {path}: {last_line(error)}") from error


def compile_with(model: ov.Model, properties: Mapping[str, Any]) -> ov.CompiledModel:
    """Compile with exactly these OpenVINO ``properties``, keeping the process's locale."""
    with kept_locale:
        return _core().compile_model(model, "CPU", dict(properties))


def fixed_batch(model: ov.Model) -> int | None:
    """Return the batch size that a network was exported with; None for any."""
    number = model.input().partial_shape[0]
    return None if number.is_dynamic else int(number.get_length())


def check_network(model: ov.Model, where: str) -> tuple[tuple[int, ...], int]:
    """Return ((H, W, 3), C) of an IR from uint8 NHWC to (N, C); raise if it is another kind."""
    if len(model.inputs) != 1 or len(model.outputs) != 1:
        raise ModelSetError(
            f"{where} has {len(model.inputs)} inputs and {len(model.outputs)} outputs; "
            "a member has one of each"
        )
    shape, kind = model.input().partial_shape, model.input().element_type
    height_width = [d.get_length() if d.is_static else -1 for d in shape][1:]
    if kind != ov.Type.u8 or len(height_width) != 3 or height_width[2] != 3 or -1 in height_width:
        raise ModelSetError(
            f"{where} takes {kind} {shape}; a member takes u8 [?,H,W,3] with H and W fixed: "
            "fold the preprocessing in, as tandem models add does"
        )
    out = model.output().partial_shape
    if len(out) != 2 or not out[1].is_static:
        raise ModelSetError(f"{where} gives {out}; a member gives probabilities [?,C]")
    return tuple(height_width), out[1].get_length()


def named_output(model: ov.Model, node: ov.Node, name: str) -> ov.Model:
    """Return the model that answers ``node``, under this name."""
    node.get_output_tensor(0).set_names({name})
    return ov.Model([node.output(0)], model.get_parameters(), model.friendly_name)


def add_features(model: ov.Model, where: str) -> str | None:
    """Add the pooled features to a network's outputs; return why it has none, or None."""
    try:
        model.add_outputs(pooled_features(model, where))
    except ModelSetError as error:
        return error.message
    return None


class CompiledNetwork(LoadedNetwork):
    """A network ready to run; every thread that calls it gets its own infer requests."""

    runtime: ClassVar[RuntimeName] = "openvino"
    memory_bytes = 0  # set by load

    def __init__(self, network: Path | ov.Model, options: RuntimeOptions) -> None:
        """Compile an IR, by path or in memory, once for each batch size."""
        self._network, self._cache_dir = network, options.cache_dir
        self._properties = options.properties
        self.version: str = ov.__version__.partition("-")[0]
        self.num_threads = options.num_threads
        self._of_thread = threading.local()

        self.no_features: str | None = "it was loaded without"
        first = self._read()
        self.input_shape, self.num_classes = check_network(first, str(network))
        if options.has_features:
            self.no_features = add_features(first, str(network))
        self.fixed_batch = fixed_batch(first)  # images; None: any number
        sizes = sorted({self.fixed_batch} if self.fixed_batch else set(options.batch_sizes))
        models = [first, *(self._read() for _ in sizes[1:])]
        # Compiling, or reading from the cache, mainly uses one thread. With fewer threads than
        # sizes, cores would idle while the last sizes are compiled.
        with ThreadPoolExecutor(max(options.num_threads, len(sizes))) as threads:
            compiled = list(threads.map(self._compile, models, sizes))
        # By batch size, ascending. The mapping is replaced, not changed: threads compare its
        # identity.
        self._compiled = dict(zip(sizes, compiled, strict=True))
        self._give_back_memory()
        # Computed by layers that are not INT8: f32 on CPUs without bf16.
        hint = self._compiled[sizes[0]].get_property("INFERENCE_PRECISION_HINT")
        self.float_type: str = hint.get_type_name()

    def _read(self) -> ov.Model:
        network = self._network
        model = _core().read_model(network) if isinstance(network, Path) else network.clone()
        if self.no_features is None:
            add_features(model, str(network))
        return model

    def _compile(self, model: ov.Model, size: int) -> ov.CompiledModel:
        model.reshape([size, *self.input_shape])
        return compile_with(model, self._properties)

    def _give_back_memory(self) -> None:
        read_from = [self._network.parent] if isinstance(self._network, Path) else []
        give_back_memory(*read_from, *([self._cache_dir] if self._cache_dir else []))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(self._compiled)

    def _run(self, images: Pixels | Sequence[Pixels]) -> Outputs:
        num = len(images)
        for size, run in self._runs().items():
            if size >= num:
                return run.run(images)
        raise ValueError(f"a batch of {num} images; {self.batch_sizes[-1]} is the largest")

    def add_batch_size(self, size: int) -> None:
        """Compile another size while other threads may predict; a fixed batch size stays alone."""
        if self.fixed_batch or size in self._compiled:
            return
        added = self._compile(self._read(), size)
        self._compiled = dict(sorted((self._compiled | {size: added}).items()))
        self._give_back_memory()

    def remove_batch_size(self, size: int) -> None:
        """Remove a size that :meth:`add_batch_size` compiled and that no thread is using.

        Its memory is freed once each thread that used it has run another batch.
        """
        self._compiled = {of: net for of, net in self._compiled.items() if of != size}

    def _runs(self) -> dict[int, "_StaticRun"]:
        """Return the calling thread's runs by batch size, ascending."""
        of_thread, compiled = self._of_thread, self._compiled
        if getattr(of_thread, "compiled", None) is not compiled:
            before: dict[int, _StaticRun] = getattr(of_thread, "runs", {})
            of_thread.runs = {
                size: before.get(size) or _StaticRun(net, (size, *self.input_shape))
                for size, net in compiled.items()
            }
            of_thread.compiled = compiled
        runs: dict[int, _StaticRun] = of_thread.runs
        return runs

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of OpenVINO's convolution kernels, the most frequent first.

        ``brgconv_avx512_I8`` or ``jit_avx2_I8``: they decide the speed of INT8 and how it rounds.
        """
        counts: Counter[str] = Counter()
        for node in next(iter(self._compiled.values())).get_runtime_model().get_ordered_ops():
            facts = node.get_rt_info()
            if "layerType" in facts and "Convolution" in facts["layerType"].astype(str):
                counts[facts["primitiveType"].astype(str)] += 1
        return tuple(name for name, _ in counts.most_common())


class _StaticRun:
    """An infer request for a thread and a batch size, with its own input tensor.

    Images are copied into the tensor one by one on the thread that runs it. Stacking them first
    would copy twice, and a new tensor for each batch would cost more. They are copied as bytes:
    otherwise NumPy would release the GIL for each, and wait for it while the event loop decodes.
    Meanwhile no network would run on this core.
    """

    def __init__(self, compiled: ov.CompiledModel, shape: tuple[int, ...]) -> None:
        self._request = compiled.create_infer_request()
        self._tensor = ov.Tensor(ov.Type.u8, ov.Shape(shape))
        self._request.set_input_tensor(self._tensor)
        self._pixels = self._tensor.data  # (N, H, W, 3)
        self._pixels[...] = 0
        self._bytes = memoryview(self._pixels.reshape(-1))
        self._rows = self._request.get_output_tensor(0).data  # (N, C)
        has_features = len(compiled.outputs) > 1
        self._features = self._request.get_output_tensor(1).data if has_features else None  # (N, F)

    def run(self, images: Pixels | Sequence[Pixels]) -> Outputs:
        """Run these images; the batch's other places do not affect them."""
        shape = self._pixels.shape[1:]
        num_bytes = self._pixels[0].size
        for place, image in enumerate(images):
            check_image(image, shape)
            start = place * num_bytes
            self._bytes[start : start + num_bytes] = memoryview(image.reshape(-1))
        self._request.start_async()
        self._request.wait()
        rows: Probabilities = self._rows[: len(images)].astype(np.float32)  # a copy in every case
        return rows, None if self._features is None else self._features[: len(images)].copy()


WEIGHTED = ("MatMul", "Convolution", "GroupConvolution", "ConvolutionBackpropData")
ROUNDING = ("FakeQuantize", "Convert")
SOUGHT = "a fully connected layer (MatMul) or a 1 x 1 Convolution with constant weights"
Weights = npt.NDArray[np.float32]


def pooled_features(model: ov.Model, where: str) -> ov.Output:
    """Return the features of a network's images, float32 (N, F), as an output of its graph.

    ``where`` names the network in errors. Raises :class:`ModelSetError` if no layer scores the
    classes, or its input is no vector and no map.
    """
    layer = _scoring_layer(model)
    if layer is None:
        raise ModelSetError(
            f"{where} has no place to cut: looked for {SOUGHT} that all of the image passes, and "
            "no layer with weights is one. Take a set whose networks end in one"
        )
    if not _is_scoring(layer):
        kernel = list(layer.input(1).get_partial_shape())[2:] if "Conv" in _kind(layer) else []
        shape = f" of {' x '.join(map(str, kernel))}" if kernel else ""
        raise ModelSetError(
            f"{where} has no place to cut: looked for {SOUGHT}, and its last layer with weights, "
            f"{layer.get_friendly_name()}, is a {_kind(layer)}{shape}. Take a set whose networks "
            "end in one"
        )
    source = next(port for port in layer.inputs() if _varies(port)).get_source_output()
    while _kind(source.get_node()) in ROUNDING:
        source = source.get_node().input_value(0)
    return _as_vectors(source, where)


def num_features(model: ov.Model) -> int | None:
    """Return the length F of pooled features; None: it has none, or of no fixed length."""
    try:
        length = list(pooled_features(model, "").get_partial_shape())[1]
    except ModelSetError:
        return None
    return int(length.get_length()) if length.is_static else None


def features_network(model: ov.Model, where: str) -> ov.Model:
    """Return a network from the model's images to its features, float32 (N, F).

    Raises :class:`ModelSetError` as :func:`pooled_features` does.
    """
    features = pooled_features(model, where)
    return ov.Model([features], model.get_parameters(), f"{model.friendly_name}_features")


def with_head(model: ov.Model, weights: Weights, bias: Weights, where: str) -> ov.Model:
    """Return the network with another scoring layer, in float, and a softmax.

    The logits are the features times ``weights``, (F, C), plus ``bias``, (C,). All before the cut
    stays as it is. Raises :class:`ModelSetError` as :func:`pooled_features` does.
    """
    scores = ops.matmul(pooled_features(model, where), weights, False, False, name="head")
    logits = ops.add(scores, bias[None])
    return named_output(model, ops.softmax(logits, axis=1), "probabilities")


def _scoring_layer(model: ov.Model) -> ov.Node | None:
    """Return the last layer with weights that everything passes; None if there is none."""
    for node in _passed_by_all(model):
        if _kind(node) in WEIGHTED and sum(map(_varies, node.inputs())) == 1:
            return node
    return None


def _passed_by_all(model: ov.Model) -> Iterator[ov.Node]:
    """Yield the nodes through which all ways from the image to the first output lead, last first.

    In reverse topological order a node is one of these if no other node waits for its inputs.
    """
    end = model.outputs[0].get_node()
    waiting = {end.get_name()}
    for node in reversed(model.get_ordered_ops()):
        if node.get_name() not in waiting:
            continue
        if len(waiting) == 1:
            yield node
        waiting.remove(node.get_name())
        sources = (port.get_source_output().get_node() for port in node.inputs() if _varies(port))
        waiting.update(source.get_name() for source in sources)


def _varies(port: ov.Input) -> bool:
    """Whether a value depends on the image: it is no constant, nor made of constants."""
    seen, nodes = set[str](), [port.get_source_output().get_node()]
    while nodes:
        node = nodes.pop()
        if _kind(node) == "Parameter":
            return True
        for inner in node.inputs():
            source = inner.get_source_output().get_node()
            if source.get_name() not in seen:
                seen.add(source.get_name())
                nodes.append(source)
    return False


def _is_scoring(layer: ov.Node) -> bool:
    if _kind(layer) == "MatMul":
        return True
    sides = list(layer.input(1).get_partial_shape())[2:]
    return _kind(layer) == "Convolution" and all(side == 1 for side in sides)


def _as_vectors(source: ov.Output, where: str) -> ov.Output:
    """Return (N, F) of (N, F), (N, F, 1, 1), (N, 1, F) or a map (N, F, H, W), whose mean it is."""
    shape = source.get_partial_shape()
    sides = [side.get_length() if side.is_static else 0 for side in list(shape)[1:]]
    if len(sides) == 3 and 0 not in sides and max(sides[1:]) > 1:
        source = ops.reduce_mean(source, np.array([2, 3]), keep_dims=False).output(0)
    elif len(sides) > 1 and 0 not in sides and sum(side > 1 for side in sides) <= 1:
        source = ops.reshape(source, np.array([0, -1]), special_zero=True).output(0)
    elif len(sides) != 1 or 0 in sides:
        raise ModelSetError(
            f"{where} has no place to cut: its scoring layer takes {shape}, and a vector an image "
            "or a map is looked for. Take another set"
        )
    if source.get_element_type() != ov.Type.f32:
        source = ops.convert(source, "f32").output(0)
    return source


def _kind(node: ov.Node) -> str:
    return str(node.get_type_name())
