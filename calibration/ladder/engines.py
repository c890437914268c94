"""The engines that run a network in the way of a rung, and the outcome of a rung."""

import itertools
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import openvino as ov

from calibration.evaluation.inference import Networks
from calibration.ladder import preparations as prepared
from calibration.ladder.ladder import run_calls
from calibration.ladder.preparations import normalised, random_pixels
from calibration.ladder.rungs import (
    TRUTH,
    Choices,
    LadderJob,
    RungOptions,
    RungResult,
    Say,
    SkippedError,
)
from models.ensemble import Probabilities, average
from models.errors import TandemError
from models.image import ImageInputs, sides_of
from models.machine import MissingExtraError, needs_extra
from models.openvino_network import Pixels, compile_with, read_network
from models.plan import in_steps

WARM_UP, TRIAL = 0.2, 0.15  # of a run's time; the trial of each of several choices
TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True)
class ReadyNetwork:
    """A network ready to run in one way."""

    calls: Sequence[Callable[[], object]]  # one for each caller, with its own input
    # Returns float32 (N, C) probabilities or logits for uint8 (N, H, W, 3) BGR, N the batch.
    predict: Callable[[Pixels], Probabilities]
    note: Callable[[], str]  # for readers of the figures, once they were measured


def _random_inputs(job: LadderJob, options: RungOptions, number: int) -> list[Pixels]:
    seeds = range(prepared.SEED, prepared.SEED + number)
    return [random_pixels(options.batch, job.network.size, seed) for seed in seeds]


def openvino_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Compile a member's IR with the properties of a rung; an infer request for each call."""
    model = read_network(prepared.member_ir(job, options.precision))
    built_in, batch = model.input().partial_shape[0], options.batch
    if built_in.is_static and (n := built_in.get_length()) != batch:
        raise SkippedError(f"the network takes {n} images at a time, not {batch}")
    if options.is_static:
        model.reshape([batch, *sides_of(job.network.size), 3])
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
    if kind != options.float_type:
        raise SkippedError(
            f"this CPU has no {options.float_type}: OpenVINO would compute in {kind}"
        )
    is_parallel = options.hint == "throughput" or options.streams is not None
    num = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") if is_parallel else 1
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
        str(job.work / prepared.ONNX_NAME), settings, providers=["CPUExecutionProvider"]
    )

    def run(images: Any) -> Probabilities:
        return np.asarray(session.run([prepared.OUTPUT], {prepared.INPUT: images})[0])

    inputs = map(normalised, _random_inputs(job, options, options.callers))
    note = f"intra-op threads: {settings.intra_op_num_threads}"
    calls = [partial(run, images) for images in inputs]
    return ReadyNetwork(calls, lambda pixels: run(normalised(pixels)), lambda: note)


def torch_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Prepare PyTorch: eager, TorchScript or torch.compile, in a memory format and float type.

    Inputs are prepared float tensors, so preprocessing is not measured. OpenVINO's networks contain
    it, and there it is measured.
    """
    torch = prepared.import_torch()
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
    network = prepared.torch_module(job).to(**form)
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
    is_fast, model_set = options.plan == "fast", job.set_of_network
    if is_fast and not job.has_images:
        raise SkippedError("which members the fast plan asks depends on the images: --images")
    manifest, weights = model_set.manifest, model_set.manifest.weights
    plan = manifest.fast_plan if is_fast else None
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
        pixels = np.load(job.work / prepared.INPUTS_NAME)
        return [*np.resize(pixels, (max(1, len(pixels) // batch), batch, *pixels.shape[1:]))]
    seeds = range(prepared.SEED, prepared.SEED + 4)
    sizes = [rule.input_size for rule in inputs.rules]
    return [inputs.joined([random_pixels(batch, size, seed) for size in sizes]) for seed in seeds]


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
        if task in prepared.PREPARATIONS:
            prepared.PREPARATIONS[task](job)
            return RungResult(outcome="prepared")
        return _measured(job, task, choices, say)
    except (SkippedError, MissingExtraError) as error:
        return RungResult(outcome="skipped", reason=error.message)
    except TandemError as error:
        return RungResult(outcome="failed", reason=error.message)
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
    name = prepared.INPUTS_NAME if engine == "ensemble" else prepared.PIXELS_NAME
    figures = figures.model_copy(update=_top1(job, ready, chosen.batch, name))
    return RungResult(
        outcome="measured",
        chosen=chosen,
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=(ready.note(),),
    )


def _top1(job: LadderJob, ready: ReadyNetwork, batch: int, name: str) -> dict[str, float]:
    if not job.has_images:
        return {}
    pixels = np.load(job.work / name, mmap_mode="r")
    truth, num_right = np.load(job.work / TRUTH), 0
    for start in range(0, len(truth), batch):
        part = pixels[start : start + batch]
        whole = np.resize(part, (batch, *part.shape[1:]))  # the last is filled up with its own
        answers = ready.predict(whole)[: len(part)].argmax(axis=1)
        num_right += int((answers == truth[start : start + batch]).sum())
    return {"top1": round(num_right / len(truth), 4), "num_labelled": len(truth)}


def best_choice(job: LadderJob, engine: str, choices: Choices) -> tuple[RungOptions, ReadyNetwork]:
    """Return the choice with the highest throughput in a short run.

    Raises :class:`SkippedError` if the machine can run none of them.
    """
    best: tuple[float, RungOptions, ReadyNetwork] | None = None  # frees the others' memory
    reasons: list[str] = []
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
