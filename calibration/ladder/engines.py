"""The engines that run a network in the way of a rung, and the preparation of their networks."""

import contextlib
import itertools
import json
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.ladder.rungs import LABELLED, RungNetwork, RungOptions, RungTask, SkippedError
from calibration.sets.input import MEAN_RGB, SCALE_RGB
from models.ensemble import Probabilities, average, is_sure, tempered
from models.errors import ImageError, ModelSetError
from models.machine import needs_extra
from models.manifest import Manifest, MemberRecord, Network, QuantizationOptions, read_manifest
from models.model_set import ModelSet
from models.network import load
from models.openvino_network import (
    CompiledNetwork,
    Pixels,
    RuntimeOptions,
    compile_with,
    read_network,
)
from models.record import ImageRecord, Precision

SEED = 20
# In the work folder: the network as ONNX, and the INT8 network of a member without one in its set.
ONNX_NAME, INT8_NAME = "network.onnx", "int8.xml"
# The labelled images: the member's input, uint8 (N, H, W, 3); all members' inputs, as in
# models.image; the classes, int64 (N,).
PIXELS_NAME, INPUTS_NAME, TRUTH_NAME = (f"labelled-{n}.npy" for n in ("pixels", "inputs", "truth"))
INPUT, OUTPUT = "images", "logits"  # of the ONNX network
ALIKE = 0.02  # of a probability; FP16 weights and other kernels differ by less
CALIBRATION_IMAGES = 48  # random images: they set ranges, whose quality does not matter for speed
AUXILIARY = ("googlenet", "inception_v3")  # return more than logits, or warn of random weights
TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True)
class ReadyNetwork:
    """A network ready to run in one way."""

    calls: Sequence[Callable[[], object]]  # one for each caller, with its own input
    # Returns float32 (N, C) probabilities or logits for uint8 (N, H, W, 3) BGR, N the batch.
    predict: Callable[[Pixels], Probabilities]
    note: Callable[[], str]  # for readers of the figures, once they were measured


def random_pixels(num_images: int, size: int, seed: int = SEED) -> Pixels:
    """Return uint8 (N, size, size, 3) BGR, the same for the same seed."""
    rng = np.random.default_rng(seed)
    # Coarse noise, enlarged: like pictures it has areas, while all white noise looks alike.
    coarse = rng.integers(0, 256, (num_images, -(-size // 16), -(-size // 16), 3), np.uint8)
    enlarged = coarse.repeat(16, axis=1).repeat(16, axis=2)[:, :size, :size]
    pixels: Pixels = np.maximum(enlarged, rng.integers(0, 32, enlarged.shape, np.uint8))
    return pixels


def normalised(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Turn uint8 (N, H, W, 3) BGR into the networks' float32 (N, 3, H, W) RGB, contiguous."""
    rgb = pixels[..., ::-1].astype(np.float32)
    scaled = (rgb - np.array(MEAN_RGB, np.float32)) / np.array(SCALE_RGB, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def _random_inputs(task: RungTask, options: RungOptions, number: int) -> list[Pixels]:
    return [random_pixels(options.batch, task.network.size, SEED + n) for n in range(number)]


def top1(network: ReadyNetwork, task: RungTask, batch: int) -> tuple[float | None, int]:
    """Return the top-1 accuracy on the ladder's labelled images, and the number of images.

    (None, 0) without labelled images. The last batch is filled up with its own images.
    """
    if not (task.work / TRUTH_NAME).is_file():
        return None, 0
    name = INPUTS_NAME if task.engine == "ensemble" else PIXELS_NAME
    pixels = np.load(task.work / name, mmap_mode="r", allow_pickle=False)
    truth = np.load(task.work / TRUTH_NAME, allow_pickle=False)
    num_right = 0
    for start in range(0, len(truth), batch):
        part = pixels[start : start + batch]
        whole = np.resize(part, (batch, *part.shape[1:]))
        answers = network.predict(whole)[: len(part)].argmax(axis=1)
        num_right += int((answers == truth[start : start + batch]).sum())
    return round(num_right / len(truth), 4), len(truth)


def member_ir(network: RungNetwork, precision: str, work: Path) -> Path:
    """Return the verified IR: the set's own, or the ladder's if the set has no INT8.

    Raises:
        SkippedError: the set's network is for another runtime.

    """
    model_set = ModelSet(network.model_set, read_manifest(network.model_set))
    if precision == "INT8" and "INT8" not in model_set.manifest.member(network.name).networks:
        return work / INT8_NAME
    path = model_set.network_path(network.name, "INT8" if precision == "INT8" else "FP16")
    if path.suffix != ".xml":
        raise SkippedError(f"{path.name} is not for OpenVINO")
    return path


def openvino_network(task: RungTask, options: RungOptions) -> ReadyNetwork:
    """Compile a member's IR with the properties of a rung; an infer request for each call."""
    model = read_network(member_ir(task.network, options.precision, task.work))
    built_in, batch = model.input().partial_shape[0], options.batch
    if built_in.is_static and (n := built_in.get_length()) != batch:
        raise SkippedError(f"the network takes {n} images at a time, not {batch}")
    if options.is_static:
        model.reshape([batch, task.network.size, task.network.size, 3])
    compiled = compile_with(model, _properties(options, task.cores))
    kind = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if kind != options.float_type:
        raise SkippedError(
            f"this CPU has no {options.float_type}: OpenVINO would compute in {kind}"
        )
    is_parallel = options.hint == "throughput" or options.streams is not None
    num = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") if is_parallel else 1
    requests = [_request(compiled, pixels) for pixels in _random_inputs(task, options, num)]
    note = f"streams: {compiled.get_property('NUM_STREAMS')}, infer requests: {num}"

    def predict(pixels: Pixels) -> Probabilities:
        requests[0].get_input_tensor().data[...] = pixels
        _infer(requests[0])
        return np.array(requests[0].get_output_tensor(0).data)

    return ReadyNetwork([partial(_infer, request) for request in requests], predict, lambda: note)


def _properties(options: RungOptions, cores: int) -> dict[str, Any]:
    """Return OpenVINO's properties for a rung.

    The number of threads and the float type are always set: OpenVINO ignores cgroup quotas, and
    uses bf16 by default on CPUs with it, which is a separate rung here.
    """
    properties: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": options.threads or cores,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": options.float_type,
    }
    if options.hint != "none":
        properties["PERFORMANCE_HINT"] = options.hint.upper()
    if options.streams is not None:
        properties["NUM_STREAMS"] = options.streams
    return properties


def _request(compiled: ov.CompiledModel, pixels: Pixels) -> ov.InferRequest:
    """Return an infer request with its own input tensor."""
    request, tensor = compiled.create_infer_request(), ov.Tensor(ov.Type.u8, ov.Shape(pixels.shape))
    tensor.data[...] = pixels
    request.set_input_tensor(tensor)
    return request


def _infer(request: ov.InferRequest) -> None:
    """Run a request on OpenVINO's threads."""
    request.start_async()
    request.wait()


def onnx_network(task: RungTask, options: RungOptions) -> ReadyNetwork:
    """Make a session on the CPU, shared by callers with their own inputs."""
    with needs_extra("ladder", "ladder"):
        import onnxruntime
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads or task.cores
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(task.work / ONNX_NAME), settings, providers=["CPUExecutionProvider"]
    )

    def run(images: npt.NDArray[np.float32]) -> Probabilities:
        return np.asarray(session.run([OUTPUT], {INPUT: images})[0])

    inputs = map(normalised, _random_inputs(task, options, options.callers))
    note = f"intra-op threads: {settings.intra_op_num_threads}"
    calls = [partial(run, images) for images in inputs]
    return ReadyNetwork(calls, lambda pixels: run(normalised(pixels)), lambda: note)


def export(task: RungTask) -> None:
    """Export the PyTorch network with a dynamic batch; an incomplete file is removed."""
    torch = import_torch()
    with needs_extra("ladder", "ladder"):
        import onnxscript  # noqa: F401  (torch exports with it)
    incomplete = task.work / "partial.onnx"
    torch.onnx.export(
        torch_module(task),
        (torch.from_numpy(normalised(random_pixels(2, task.network.size))),),
        incomplete,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    incomplete.replace(task.work / ONNX_NAME)


def import_torch(what: str = "ladder") -> Any:
    """Return the package, which only the extras bring; ``what`` is the command that needs it."""
    with needs_extra("ladder", what):
        import torch
    return torch


def torch_network(task: RungTask, options: RungOptions) -> ReadyNetwork:
    """Prepare PyTorch: eager, TorchScript or torch.compile, in a memory format and float type.

    Inputs are prepared float tensors, so preprocessing is not measured. OpenVINO's networks contain
    it, and there it is measured.
    """
    torch = import_torch()
    check_possible(options)
    of_thread = threading.local()
    form = {"dtype": getattr(torch, TORCH_TYPES[options.float_type])}
    if options.is_channels_last:
        form["memory_format"] = torch.channels_last

    def run(tensor: Any) -> Any:
        if options.threads and not hasattr(of_thread, "is_set"):  # OpenMP's, of a calling thread
            torch.set_num_threads(options.threads)
            of_thread.is_set = True
        with torch.inference_mode(mode=options.is_inference_mode):
            return network(tensor)

    def tensor_of(pixels: Pixels) -> Any:
        return torch.from_numpy(normalised(pixels)).to(**form)

    torch.set_num_threads(options.threads or torch.get_num_threads())
    network = torch_module(task).to(**form)
    inputs = [tensor_of(pixels) for pixels in _random_inputs(task, options, options.callers)]
    if options.mode == "script":
        with torch.inference_mode():
            network = torch.jit.freeze(torch.jit.trace(network, inputs[0]))
    elif options.mode == "compile":
        network = torch.compile(network)  # compiles at the first call
    note = f"PyTorch's threads: {torch.get_num_threads()}"
    return ReadyNetwork(
        [partial(run, tensor) for tensor in inputs],
        lambda pixels: run(tensor_of(pixels)).detach().float().numpy(),
        lambda: note,
    )


def check_possible(options: RungOptions) -> None:
    """Raise :class:`SkippedError` if this machine's PyTorch cannot run these options."""
    from calibration.training.train import has_bf16

    if options.float_type == "bf16" and not has_bf16():
        raise SkippedError(
            "this CPU has neither avx512_bf16 nor amx_bf16: PyTorch would emulate bfloat16"
        )
    if options.mode == "compile" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise SkippedError("torch.compile needs a C++ compiler (apt-get install g++)")


def torch_module(task: RungTask) -> Any:
    """Return the network in evaluation mode: float32 (N, 3, H, W) RGB, normalised, to logits.

    Raises:
        SkippedError: the member has no PyTorch source.
        ModelSetError: torchvision has no classification network of that name.

    """
    if task.network.torch_source == "random":
        return random_module(task.network)
    no_source = (
        f"member {task.network.name} is an OpenVINO network without its PyTorch source; "
        "tandem ladder NAME --random-weights measures a torchvision network of any size"
    )
    if task.network.torch_source == "none":
        raise SkippedError(no_source)
    return _restored(task, no_source)


def random_module(network: RungNetwork) -> Any:
    """Build a torchvision network with random weights, the same each time."""
    torch = import_torch()
    from calibration.sets.convert import torchvision_models

    models = torchvision_models()
    names = [name for name in models.list_models(module=models) if name not in AUXILIARY]
    if network.name not in names:
        raise ModelSetError(
            f"torchvision has no classification network {network.name!r}; it has: "
            f"{', '.join(names)}"
        )
    arguments: dict[str, Any] = {"weights": None, "num_classes": network.num_classes}
    if network.name.startswith("vit_"):  # its position embedding has a fixed size
        arguments["image_size"] = network.size
    torch.manual_seed(SEED)
    return models.get_model(network.name, **arguments).eval()


def _restored(task: RungTask, no_source: str) -> Any:
    """Load the float IR's weights into the architecture, and check that the answers are equal."""
    torch = import_torch()
    from calibration.ladder.unfold import unfold
    from calibration.sets.convert import build_network

    network, ir = task.network, member_ir(task.network, "FP16", task.work)
    module = build_network(network.name, network.num_classes)
    pixels = random_pixels(4, network.size)
    batch = torch.from_numpy(normalised(pixels))
    try:
        unfold(module, read_network(ir), batch)
    except (ModelSetError, KeyError, RuntimeError) as error:
        raise SkippedError(f"{no_source} (its IR does not fit: {error})") from error
    module.eval()
    options = RuntimeOptions(num_threads=task.cores, batch_sizes=(len(pixels),))
    expected = CompiledNetwork(ir, options).predict(pixels)
    with torch.inference_mode():
        answers = module(batch).softmax(1).numpy()
    if (by := float(np.abs(answers - expected).max())) > ALIKE:
        raise SkippedError(f"{no_source} (restored from its IR it answers otherwise, by {by:.2f})")
    return module


class EnsembleNetwork:
    """The members compiled as for serving: fixed batch sizes, a stream per core.

    With a cascade the first member answers alone if its margin is at least ``cascade_margin``. How
    often it does depends on the images, so it is only measured with labelled ones.
    """

    def __init__(self, task: RungTask, options: RungOptions) -> None:
        self._margin, batch = options.cascade_margin, options.batch
        if self._margin is not None and not (task.work / TRUTH_NAME).is_file():
            raise SkippedError("how many images a cascade answers alone depends on them: --images")
        self._manifest = read_manifest(task.network.model_set)
        model_set = ModelSet(task.network.model_set, self._manifest)
        sizes = {*(2**n for n in range(batch.bit_length())), batch}
        self.num_callers = options.streams or task.cores
        compiled = RuntimeOptions(
            num_threads=task.cores,
            num_streams=self.num_callers,
            batch_sizes=(batch,) if self._margin is None else tuple(sorted(sizes)),
            float_type=self._manifest.float_type,
        )
        self._networks = {
            name: load(model_set.network_path(name, "INT8"), compiled)
            for name in self._manifest.weights
        }
        self._num_asked = self._num_skipped = 0

    def note(self) -> str:
        """Return how many members answered."""
        if self._margin is None or not self._num_asked:
            return f"{len(self._networks)} members for every image"
        share = self._num_skipped / self._num_asked
        return f"the first member alone answered {share:.0%} (cascade_margin {self._margin:g})"

    def predict(self, images: Pixels) -> Probabilities:
        """Return the members' average for a batch of their inputs."""
        first, *others = self._networks
        answer = self._rows(first, images)
        part: slice | npt.NDArray[np.intp] = slice(None)
        if self._margin is not None:
            part = np.flatnonzero(~is_sure(answer, self._margin))
            self._num_asked += len(images)
            self._num_skipped += len(images) - len(part)
            if not len(part):
                return answer
        rows = {name: self._rows(name, images[part]) for name in others}
        rows = {first: answer[part]} | rows
        answer[part] = average(rows, self._manifest.weights, self._manifest.temperature)
        return answer

    def _rows(self, name: str, images: Pixels) -> Probabilities:
        rows = self._networks[name].predict(self._manifest.inputs.of(name, images))
        return tempered(rows, self._manifest.temperatures[name])


def ensemble_network(task: RungTask, options: RungOptions) -> ReadyNetwork:
    """Prepare all members in INT8, averaged, with a cascade or on every image."""
    network = EnsembleNetwork(task, options)
    batches = _batches(task, options.batch)

    def caller(place: int) -> Callable[[], object]:
        coming = itertools.cycle([*batches[place:], *batches[:place]])
        return lambda: network.predict(next(coming))

    calls = [caller(number % len(batches)) for number in range(network.num_callers)]
    return ReadyNetwork(calls, network.predict, network.note)


def _batches(task: RungTask, batch: int) -> list[Pixels]:
    """Return whole batches of the labelled images, or of random ones if there are none."""
    if (task.work / TRUTH_NAME).is_file():
        pixels: Pixels = np.load(task.work / INPUTS_NAME, allow_pickle=False)
        number = max(1, len(pixels) // batch)
        return list(np.resize(pixels, (number, batch, *pixels.shape[1:])))
    inputs = read_manifest(task.network.model_set).inputs
    return [
        inputs.joined([random_pixels(batch, rule.input_size, SEED + n) for rule in inputs.rules])
        for n in range(4)
    ]


def make_set(task: RungTask) -> None:
    """Make a model set with a torchvision network of random weights, float and INT8."""
    import_torch("ladder --random-weights")
    from calibration.sets.add_set import finish
    from calibration.sets.convert import convert_module
    from calibration.sets.transaction import create

    network = task.network
    model = convert_module(random_module(network), network.name, network.size)
    with create(network.model_set, is_replaced=True) as staging:
        whole = staging.network(model, f"{network.name}-fp16", is_float=True)
        int8 = quantized_by_random_images(model, network)
        int8 = staging.network(int8, f"{network.name}-int8", is_float=False)
        networks: dict[Precision, Network] = {"FP16": whole, "INT8": int8}
        labels = "".join(f"class {index}\n" for index in range(network.num_classes))
        manifest = Manifest(
            name=network.model_set.name,
            description=f"{network.name} with random weights: speed only",
            image=ImageRecord(input_size=network.size, resize_shorter=round(network.size * 8 / 7)),
            num_classes=network.num_classes,
            labels=staging.text("labels.txt", labels),
            members=(MemberRecord(name=network.name, source="random weights", networks=networks),),
        )
        finish(staging, manifest)


def quantize(task: RungTask) -> None:
    """Quantise a member whose set has no INT8 network, with random images: for speed only."""
    if "INT8" in read_manifest(task.network.model_set).member(task.network.name).networks:
        return
    model = read_network(member_ir(task.network, "FP16", task.work))
    path = task.work / INT8_NAME
    partial = path.with_name(f"partial-{path.name}")
    ov.save_model(quantized_by_random_images(model, task.network), partial, compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        partial.with_suffix(suffix).replace(path.with_suffix(suffix))


def quantized_by_random_images(model: ov.Model, network: RungNetwork) -> ov.Model:
    """Quantise as ``tandem quantize`` does."""
    with needs_extra("calibrate", "ladder"):
        from calibration.quantization.quantize import quantize as quantized
    images = random_pixels(CALIBRATION_IMAGES, network.size)
    return quantized(model, list(images), QuantizationOptions())


def keep_labelled(task: RungTask) -> None:
    """Decode the labelled images once, as the service does, for every rung's top-1.

    Raises:
        ModelSetError: no image can be read, they are of other classes, or calibration used them.

    """
    assert task.images is not None
    model_set = ModelSet(task.network.model_set, read_manifest(task.network.model_set))
    chosen = read_dataset(task.images, model_set).images
    if 0 < task.max_images < len(chosen):
        chosen = tuple(random.Random(SEED).sample(chosen, task.max_images))
    check_not_calibrated(model_set, chosen)
    inputs, images, files = model_set.manifest.inputs, [], []
    for image in chosen:
        with contextlib.suppress(ImageError, OSError):
            file = (str(image.path.resolve()), image.class_index)
            images.append(inputs.read(image.path.read_bytes()))
            files.append(file)
    if not images:
        raise ModelSetError(f"none of {len(chosen)} images of {task.images} can be read")
    whole, truth = np.stack(images), np.array([index for _, index in files], np.int64)
    np.save(task.work / INPUTS_NAME, whole, allow_pickle=False)
    np.save(task.work / PIXELS_NAME, inputs.of(task.network.name, whole), allow_pickle=False)
    (task.work / LABELLED).write_text(json.dumps(files), "utf-8")
    # The last file: its presence shows that all files are complete.
    np.save(task.work / TRUTH_NAME, truth, allow_pickle=False)


ENGINES: dict[str, Callable[[RungTask, RungOptions], ReadyNetwork]] = {
    "torch": torch_network,
    "onnxruntime": onnx_network,
    "openvino": openvino_network,
    "ensemble": ensemble_network,
}
PREPARATIONS: dict[str, Callable[[RungTask], None]] = {
    "make_set": make_set,
    "labelled": keep_labelled,
    "quantize": quantize,
    "export": export,
}
