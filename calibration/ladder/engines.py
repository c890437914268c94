"""The engines that run a network in the way of a rung, and what rungs share, made once."""

import contextlib
import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from calibration.datasets import read_dataset
from calibration.evaluation.evaluate import check_not_calibrated
from calibration.evaluation.inference import Networks
from calibration.ladder.ladder import run_calls
from calibration.ladder.rungs import (
    PHOTOS,
    TRUTH,
    Choices,
    LadderJob,
    RungNetwork,
    RungOptions,
    RungResult,
    Say,
    SkippedError,
)
from calibration.sets.input import MEAN_RGB, SCALE_RGB
from models.ensemble import Probabilities, average, in_steps
from models.errors import ImageError, ModelSetError, TandemError
from models.image import ImageInputs, Size, sides_of
from models.machine import MissingExtraError, needs_extra
from models.manifest import Manifest, MemberRecord, Network, QuantizationOptions
from models.network import RuntimeOptions, load
from models.openvino_network import Pixels, compile_with, read_network
from models.own_functions import inputs_of
from models.record import Precision

SEED = 20
# In the work folder: the network as ONNX, and the INT8 network of a member without one in its set.
ONNX_NAME, INT8_NAME = "network.onnx", "int8.xml"
# The labelled images: the member's input, uint8 (N, H, W, 3); all members', as in models.image.
PIXELS_NAME, INPUTS_NAME = "labelled-pixels.npy", "labelled-inputs.npy"
INPUT, OUTPUT = "images", "logits"  # of the ONNX network
ALIKE = 0.02  # of a probability; FP16 weights and other kernels differ by less
WARM_UP, TRIAL = 0.2, 0.15  # of a run's time; the trial of each of several choices
TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
INSTEAD = "tandem ladder NAME --random-weights measures a torchvision network of any size"
CALIBRATION_IMAGES = 48  # random images: they set ranges, whose quality does not matter for speed


def random_pixels(num_images: int, size: Size, seed: int = SEED) -> Pixels:
    """Return uint8 (N, H, W, 3) BGR, the same for the same seed."""
    rng, (height, width) = np.random.default_rng(seed), sides_of(size)
    # Coarse noise, enlarged: like pictures it has areas, while all white noise looks alike.
    coarse = rng.integers(0, 256, (num_images, -(-height // 16), -(-width // 16), 3), np.uint8)
    enlarged = coarse.repeat(16, axis=1).repeat(16, axis=2)[:, :height, :width]
    pixels: Pixels = np.maximum(enlarged, rng.integers(0, 32, enlarged.shape, np.uint8))
    return pixels


def normalised(pixels: Pixels) -> np.ndarray:
    """Turn uint8 (N, H, W, 3) BGR into the networks' float32 (N, 3, H, W) RGB, contiguous."""
    rgb = pixels[..., ::-1].astype(np.float32)
    scaled = (rgb - np.array(MEAN_RGB, np.float32)) / np.array(SCALE_RGB, np.float32)
    return np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))


def member_ir(job: LadderJob, precision: Precision) -> Path:
    """Return the verified IR: the set's own, or the ladder's if the set has no INT8.

    Raises :class:`SkippedError` if the set's network is for another runtime.
    """
    model_set, name = job.set_of_network, job.network.name
    if precision == "INT8" and "INT8" not in model_set.manifest.member(name).networks:
        return job.work / INT8_NAME
    path = model_set.network_path(name, precision)
    if path.suffix != ".xml":
        raise SkippedError(f"{path.name} is not for OpenVINO")
    return path


def torch_module(job: LadderJob) -> Any:
    """Return the network in evaluation mode: float32 (N, 3, H, W) RGB, normalised, to logits.

    Raises :class:`SkippedError` if the member has no PyTorch source.
    """
    network = job.network
    if network.is_random:
        return random_module(network)
    problem = f"member {network.name} is an OpenVINO network without its PyTorch source"
    no_source = f"{problem}; {INSTEAD}"
    if network.torch_source == "none":
        raise SkippedError(no_source)
    torch = import_torch()
    from calibration.sets.convert import build_network, unfold

    ir, pixels = member_ir(job, "FP16"), random_pixels(4, network.size)
    module = build_network(network.name, network.num_classes)
    batch = torch.from_numpy(normalised(pixels))
    try:
        unfold(module, read_network(ir), batch)
    except (ModelSetError, KeyError, RuntimeError) as error:
        raise SkippedError(f"{no_source} (its IR does not fit: {error})") from error
    expected = load(ir, RuntimeOptions(num_threads=job.cores, batch_sizes=(4,))).predict(pixels)
    with torch.inference_mode():
        answers = module.eval()(batch).softmax(1).numpy()
    if (by := float(np.abs(answers - expected).max())) > ALIKE:
        raise SkippedError(f"{no_source} (restored from its IR it answers otherwise, by {by:.2f})")
    return module


def export(job: LadderJob) -> None:
    """Export the PyTorch network with a dynamic batch; an incomplete file is removed."""
    torch = import_torch()
    with needs_extra("ladder", "ladder"):
        import onnxscript  # noqa: F401  (torch exports with it)
    incomplete = job.work / "partial.onnx"
    torch.onnx.export(
        torch_module(job),
        (torch.from_numpy(normalised(random_pixels(2, job.network.size))),),
        incomplete,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    incomplete.replace(job.work / ONNX_NAME)


def random_module(network: RungNetwork) -> Any:
    """Build a torchvision network with random weights, the same each time."""
    import_torch().manual_seed(SEED)
    from calibration.sets.convert import build_classifier

    return build_classifier(network.name, network.num_classes, network.size)


def import_torch(what: str = "ladder") -> Any:
    """Return the package, which only the extras bring; ``what`` is the command that needs it."""
    with needs_extra("ladder", what):
        import torch
    return torch


def make_set(job: LadderJob) -> None:
    """Make a model set with a torchvision network of random weights, float and INT8."""
    import_torch("ladder --random-weights")
    from calibration.sets.add_set import finish
    from calibration.sets.convert import convert_module
    from calibration.sets.options import MemberOptions
    from calibration.sets.transaction import create

    network, name = job.network, job.network.name
    model = convert_module(random_module(network), name, network.size)
    labels = "".join(f"class {index}\n" for index in range(network.num_classes))
    with create(network.model_set, is_replaced=True) as staging:
        whole = staging.network(model, f"{name}-fp16", is_float=True)
        int8 = quantized_by_random_images(model, network)
        int8 = staging.network(int8, f"{name}-int8", is_float=False)
        networks: dict[Precision, Network] = {"FP16": whole, "INT8": int8}
        manifest = Manifest(
            name=network.model_set.name,
            description=f"{name} with random weights: speed only",
            image=MemberOptions().image(network.size),
            num_classes=network.num_classes,
            labels=staging.text("labels.txt", labels),
            members=(MemberRecord(name=name, source="random weights", networks=networks),),
        )
        finish(staging, manifest)


def quantize(job: LadderJob) -> None:
    """Quantise a member whose set has no INT8 network, with random images: for speed only."""
    if "INT8" in job.set_of_network.manifest.member(job.network.name).networks:
        return
    path, partial = job.work / INT8_NAME, job.work / f"partial-{INT8_NAME}"
    int8 = quantized_by_random_images(read_network(member_ir(job, "FP16")), job.network)
    ov.save_model(int8, partial, compress_to_fp16=False)
    for suffix in (".bin", ".xml"):
        partial.with_suffix(suffix).replace(path.with_suffix(suffix))


def quantized_by_random_images(model: ov.Model, network: RungNetwork) -> ov.Model:
    """Quantise as ``tandem quantize`` does."""
    with needs_extra("calibrate", "ladder"):
        from calibration.quantization.quantize import quantize as quantized
    images = list(random_pixels(CALIBRATION_IMAGES, network.size))
    return quantized(model, images, QuantizationOptions())


def keep_labelled(job: LadderJob) -> None:
    """Decode the labelled images once, as the service does, for every rung's top-1.

    Raises :class:`ModelSetError` if no image can be read, or calibration used one.
    """
    assert job.images is not None
    model_set = job.set_of_network
    chosen = read_dataset(job.images, model_set).images
    if 0 < job.max_images < len(chosen):
        chosen = tuple(random.Random(SEED).sample(chosen, job.max_images))
    check_not_calibrated(model_set, chosen)
    inputs, photos = inputs_of(model_set.manifest), job.work / PHOTOS
    images, classes = list[Pixels](), list[int]()
    shutil.rmtree(photos, ignore_errors=True)
    photos.mkdir()
    for image in chosen:
        with contextlib.suppress(ImageError, OSError):
            path = image.path.resolve()
            pixels = inputs.first_view(path.read_bytes())
            (photos / f"{len(images):08}{path.suffix}").symlink_to(path)
            images.append(pixels)
            classes.append(image.class_index)
    if not images:
        raise ModelSetError(f"none of {len(chosen)} images of {job.images} can be read")
    whole = np.stack(images)
    np.save(job.work / INPUTS_NAME, whole)
    np.save(job.work / PIXELS_NAME, inputs.of(job.network.name, whole))
    np.save(job.work / TRUTH, np.array(classes, np.int64))  # last: all files are complete


PREPARATIONS: dict[str, Callable[[LadderJob], None]] = {
    "make_set": make_set,
    "labelled": keep_labelled,
    "quantize": quantize,
    "export": export,
}


@dataclass(frozen=True)
class ReadyNetwork:
    """A network ready to run in one way."""

    calls: Sequence[Callable[[], object]]  # one for each caller, with its own input
    # Returns float32 (N, C) probabilities or logits for uint8 (N, H, W, 3) BGR, N the batch.
    predict: Callable[[Pixels], Probabilities]
    note: Callable[[], str]  # for readers of the figures, once they were measured


def _random_inputs(job: LadderJob, options: RungOptions, number: int) -> list[Pixels]:
    seeds = range(SEED, SEED + number)
    return [random_pixels(options.batch, job.network.size, seed) for seed in seeds]


def openvino_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Compile a member's IR with the properties of a rung; an infer request for each call."""
    model = read_network(member_ir(job, options.precision))
    built_in = model.input().partial_shape[0]
    if built_in.is_static and (n := built_in.get_length()) != options.batch:
        raise SkippedError(f"the network takes {n} images at a time, not {options.batch}")
    if options.is_static:
        model.reshape([options.batch, *sides_of(job.network.size), 3])
    properties: dict[str, Any] = {  # OpenVINO ignores cgroup quotas, and prefers bf16 by itself
        "INFERENCE_NUM_THREADS": options.threads or job.cores,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": options.float_type,
    }
    if options.hint != "none":
        properties["PERFORMANCE_HINT"] = options.hint.upper()
    if options.streams is not None:
        properties["NUM_STREAMS"] = options.streams
    compiled = compile_with(model, properties)
    kind = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if (wanted := options.float_type) != kind:
        raise SkippedError(f"this CPU has no {wanted}: OpenVINO would compute in {kind}")
    is_single = options.hint != "throughput" and options.streams is None
    num = 1 if is_single else compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS")
    note = f"streams: {compiled.get_property('NUM_STREAMS')}, infer requests: {num}"

    def request_of(pixels: Pixels) -> ov.InferRequest:
        request = compiled.create_infer_request()
        request.set_input_tensor(ov.Tensor(pixels))  # its own
        return request

    def infer(request: ov.InferRequest) -> None:
        request.start_async()  # on OpenVINO's threads
        request.wait()

    def predict(pixels: Pixels) -> Probabilities:
        requests[0].get_input_tensor().data[...] = pixels
        infer(requests[0])
        return np.array(requests[0].get_output_tensor(0).data)

    requests = [request_of(pixels) for pixels in _random_inputs(job, options, num)]
    return ReadyNetwork([partial(infer, request) for request in requests], predict, lambda: note)


def onnx_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Make a session on the CPU, shared by callers with their own inputs."""
    with needs_extra("ladder", "ladder"):
        import onnxruntime
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = options.threads or job.cores
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        str(job.work / ONNX_NAME), settings, providers=["CPUExecutionProvider"]
    )

    def run(images: Any) -> Probabilities:
        return np.asarray(session.run([OUTPUT], {INPUT: images})[0])

    note = f"intra-op threads: {settings.intra_op_num_threads}"
    inputs = _random_inputs(job, options, options.callers)
    calls = [partial(run, normalised(pixels)) for pixels in inputs]
    return ReadyNetwork(calls, lambda pixels: run(normalised(pixels)), lambda: note)


def torch_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
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
    network = torch_module(job).to(**form)
    inputs = [tensor_of(pixels) for pixels in _random_inputs(job, options, options.callers)]
    if options.mode == "script":
        with torch.inference_mode():
            network = torch.jit.freeze(torch.jit.trace(network, inputs[0]))
    elif options.mode == "compile":
        network = torch.compile(network)  # compiles at the first call
    note = f"PyTorch's threads: {torch.get_num_threads()}"
    calls = [partial(run, tensor) for tensor in inputs]
    return ReadyNetwork(
        calls, lambda pixels: run(tensor_of(pixels)).detach().float().numpy(), lambda: note
    )


def check_possible(options: RungOptions) -> None:
    """Raise :class:`SkippedError` if this machine's PyTorch cannot run these options."""
    from calibration.training.train import has_bf16

    if options.float_type == "bf16" and not has_bf16():
        reason = "this CPU has neither avx512_bf16 nor amx_bf16: PyTorch would emulate bfloat16"
        raise SkippedError(reason)
    if options.mode == "compile" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise SkippedError("torch.compile needs a C++ compiler (apt-get install g++)")


def ensemble_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Compile all members in INT8 as for serving: fixed batch sizes, a stream per core.

    How often the fast plan asks a member depends on the images, so it needs labelled ones.
    """
    if options.plan == "fast" and not job.has_images:
        raise SkippedError("which members the fast plan asks depends on the images: --images")
    model_set = job.set_of_network
    manifest, weights = model_set.manifest, model_set.manifest.weights
    plan = manifest.fast_plan if options.plan == "fast" else None
    ask = partial(Networks(model_set, ["INT8"], num_threads=job.cores, plan=plan).ask, "INT8")
    at_first = list[float]()  # the share of each batch that the first step answers

    def predict(images: Pixels) -> Probabilities:
        if plan is None:
            return average(ask(weights, images), weights, manifest.temperature)
        answer = np.empty((len(images), manifest.num_classes), np.float32)
        asked = in_steps(plan, len(images), lambda names, at: ask(names, images[at]), weights)
        for step, places, rows, _ in asked:
            answer[places] = rows
            if step == 0:
                at_first.append(len(places) / len(images))
        return answer

    def note() -> str:
        if plan is None:
            return f"{len(weights)} members for every image"
        first = " and ".join(plan.steps[0].ask)
        return f"{first} alone answered {np.mean(at_first):.0%} (plan fast)"

    batches = _batches(job, manifest.inputs, options.batch)

    def caller(place: int) -> Callable[[], object]:
        coming = itertools.cycle([*batches[place:], *batches[:place]])
        return lambda: predict(next(coming))

    return ReadyNetwork([caller(n % len(batches)) for n in range(job.cores)], predict, note)


def _batches(job: LadderJob, inputs: ImageInputs, batch: int) -> list[Pixels]:
    """Return whole batches of the labelled images, or of random ones if there are none."""
    if job.has_images:
        pixels = np.load(job.work / INPUTS_NAME)
        return [*np.resize(pixels, (max(1, len(pixels) // batch), batch, *pixels.shape[1:]))]
    sizes = [rule.input_size for rule in inputs.rules]
    views = ([random_pixels(batch, size, SEED + n) for size in sizes] for n in range(4))
    return [inputs.joined(each) for each in views]


ENGINES: dict[str, Callable[[LadderJob, RungOptions], ReadyNetwork]] = {
    "torch": torch_network,
    "onnxruntime": onnx_network,
    "openvino": openvino_network,
    "ensemble": ensemble_network,
}


def outcome_of(
    job: LadderJob, task: str, choices: Choices = (), say: Say = lambda _: None
) -> RungResult:
    """Measure an engine with the best of ``choices``, or prepare; an error becomes the result.

    ``say`` is called with the progress: preparing, measuring, measured.
    """
    try:
        if task in PREPARATIONS:
            PREPARATIONS[task](job)
            return RungResult(outcome="prepared")
        return _measured(job, task, choices, say)
    except TandemError as error:
        is_skipped = isinstance(error, SkippedError | MissingExtraError)
        return RungResult(outcome="skipped" if is_skipped else "failed", reason=error.message)
    except Exception as error:  # of any runtime: the ladder continues without this rung
        lines = str(error).strip().splitlines() or [""]
        return RungResult(outcome="failed", reason=f"{type(error).__name__}: {lines[0]}")


def _measured(job: LadderJob, engine: str, choices: Choices, say: Say) -> RungResult:
    started = time.monotonic()
    say("preparing")
    chosen, ready = best_choice(job, engine, choices)
    _warm_up(ready, job)
    prepared_s = time.monotonic() - started
    say("measuring")
    figures = run_calls(ready.calls, job.seconds, chosen.batch, job.cores)
    say("measured")
    name = INPUTS_NAME if engine == "ensemble" else PIXELS_NAME
    figures = figures.model_copy(update=_top1(job, ready, chosen.batch, name))
    facts = {"chosen": chosen, "figures": figures, "notes": (ready.note(),)}
    return RungResult(outcome="measured", prepared_s=round(prepared_s, 1), **facts)


def _top1(job: LadderJob, ready: ReadyNetwork, batch: int, name: str) -> dict[str, float]:
    if not job.has_images:
        return {}
    pixels = np.load(job.work / name, mmap_mode="r")
    truth, num_right = np.load(job.work / TRUTH), 0
    for start in range(0, len(truth), batch):
        part = pixels[start : start + batch]
        whole = np.resize(part, (batch, *part.shape[1:]))  # the last is filled up with its own
        answers = ready.predict(whole)[: len(part)].argmax(axis=1)
        num_right += int((answers == truth[start:][:batch]).sum())
    return {"top1": round(num_right / len(truth), 4), "num_labelled": len(truth)}


def best_choice(job: LadderJob, engine: str, choices: Choices) -> tuple[RungOptions, ReadyNetwork]:
    """Return the choice with the highest throughput in a short run.

    Raises :class:`SkippedError` if the machine can run none of them.
    """
    best: tuple[float, RungOptions, ReadyNetwork] | None = None  # frees the others' memory
    reasons = list[str]()
    for options in choices:
        try:
            ready = ENGINES[engine](job, options)
        except SkippedError as error:
            reasons.append(error.message)
            continue
        if len(choices) == 1:
            return options, ready
        _warm_up(ready, job)
        run = run_calls(ready.calls, TRIAL * job.seconds, options.batch, job.cores)
        if best is None or run.images_per_s > best[0]:
            best = run.images_per_s, options, ready
    if best is None:
        raise SkippedError("; ".join(dict.fromkeys(reasons)))
    return best[1:]


def _warm_up(ready: ReadyNetwork, job: LadderJob) -> None:
    """Run for a while without counting: the first calls allocate, and may compile."""
    for call in ready.calls:
        call()
    run_calls(ready.calls, WARM_UP * TRIAL * job.seconds, 1, job.cores)
