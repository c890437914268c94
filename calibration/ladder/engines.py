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
import numpy.typing as npt
import openvino as ov

from calibration.ladder.measure import run_calls
from calibration.ladder.preparations import (
    INPUT,
    INPUTS_NAME,
    ONNX_NAME,
    OUTPUT,
    PIXELS_NAME,
    PREPARATIONS,
    SEED,
    TRUTH_NAME,
    import_torch,
    member_ir,
    normalised,
    random_pixels,
    torch_module,
)
from calibration.ladder.rungs import (
    Engine,
    LadderJob,
    Preparation,
    RungOptions,
    RungResult,
    SkippedError,
)
from models.ensemble import Probabilities, average, is_sure, tempered
from models.errors import TandemError
from models.machine import MissingExtraError, needs_extra
from models.manifest import read_manifest
from models.model_set import ModelSet
from models.network import load
from models.openvino_network import Pixels, RuntimeOptions, compile_with, read_network

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
    return [random_pixels(options.batch, job.network.size, SEED + n) for n in range(number)]


def top1(
    network: ReadyNetwork, job: LadderJob, batch: int, *, of_ensemble: bool
) -> tuple[float | None, int]:
    """Return the top-1 accuracy on the ladder's labelled images, and the number of images.

    (None, 0) without labelled images. The last batch is filled up with its own images.
    """
    if not (job.work / TRUTH_NAME).is_file():
        return None, 0
    name = INPUTS_NAME if of_ensemble else PIXELS_NAME
    pixels = np.load(job.work / name, mmap_mode="r", allow_pickle=False)
    truth = np.load(job.work / TRUTH_NAME, allow_pickle=False)
    num_right = 0
    for start in range(0, len(truth), batch):
        part = pixels[start : start + batch]
        whole = np.resize(part, (batch, *part.shape[1:]))
        answers = network.predict(whole)[: len(part)].argmax(axis=1)
        num_right += int((answers == truth[start : start + batch]).sum())
    return round(num_right / len(truth), 4), len(truth)


def openvino_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Compile a member's IR with the properties of a rung; an infer request for each call."""
    model = read_network(member_ir(job.network, options.precision, job.work))
    built_in, batch = model.input().partial_shape[0], options.batch
    if built_in.is_static and (n := built_in.get_length()) != batch:
        raise SkippedError(f"the network takes {n} images at a time, not {batch}")
    if options.is_static:
        model.reshape([batch, job.network.size, job.network.size, 3])
    compiled = compile_with(model, _properties(options, job.cores))
    kind = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if kind != options.float_type:
        raise SkippedError(
            f"this CPU has no {options.float_type}: OpenVINO would compute in {kind}"
        )
    is_parallel = options.hint == "throughput" or options.streams is not None
    num = compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") if is_parallel else 1
    requests = [_request(compiled, pixels) for pixels in _random_inputs(job, options, num)]
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

    def run(images: npt.NDArray[np.float32]) -> Probabilities:
        return np.asarray(session.run([OUTPUT], {INPUT: images})[0])

    inputs = map(normalised, _random_inputs(job, options, options.callers))
    note = f"intra-op threads: {settings.intra_op_num_threads}"
    calls = [partial(run, images) for images in inputs]
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


class EnsembleNetwork:
    """The members compiled as for serving: fixed batch sizes, a stream per core.

    With a cascade the first member answers alone if its margin is at least ``cascade_margin``. How
    often it does depends on the images, so it is only measured with labelled ones.
    """

    def __init__(self, job: LadderJob, options: RungOptions) -> None:
        self._margin, batch = options.cascade_margin, options.batch
        if self._margin is not None and not (job.work / TRUTH_NAME).is_file():
            raise SkippedError("how many images a cascade answers alone depends on them: --images")
        self._manifest = read_manifest(job.network.model_set)
        model_set = ModelSet(job.network.model_set, self._manifest)
        sizes = {*(2**n for n in range(batch.bit_length())), batch}
        self.num_callers = options.streams or job.cores
        compiled = RuntimeOptions(
            num_threads=job.cores,
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


def ensemble_network(job: LadderJob, options: RungOptions) -> ReadyNetwork:
    """Prepare all members in INT8, averaged, with a cascade or on every image."""
    network = EnsembleNetwork(job, options)
    batches = _batches(job, options.batch)

    def caller(place: int) -> Callable[[], object]:
        coming = itertools.cycle([*batches[place:], *batches[:place]])
        return lambda: network.predict(next(coming))

    calls = [caller(number % len(batches)) for number in range(network.num_callers)]
    return ReadyNetwork(calls, network.predict, network.note)


def _batches(job: LadderJob, batch: int) -> list[Pixels]:
    """Return whole batches of the labelled images, or of random ones if there are none."""
    if (job.work / TRUTH_NAME).is_file():
        pixels: Pixels = np.load(job.work / INPUTS_NAME, allow_pickle=False)
        number = max(1, len(pixels) // batch)
        return list(np.resize(pixels, (number, batch, *pixels.shape[1:])))
    inputs = read_manifest(job.network.model_set).inputs
    return [
        inputs.joined([random_pixels(batch, rule.input_size, SEED + n) for rule in inputs.rules])
        for n in range(4)
    ]


ENGINES: dict[str, Callable[[LadderJob, RungOptions], ReadyNetwork]] = {
    "torch": torch_network,
    "onnxruntime": onnx_network,
    "openvino": openvino_network,
    "ensemble": ensemble_network,
}


def outcome_of(
    job: LadderJob,
    engine: Engine | Preparation,
    choices: Sequence[RungOptions] = (RungOptions(),),
    say: Callable[[str], None] = lambda _: None,
) -> RungResult:
    """Measure the engine with the best of ``choices``, or prepare; an error becomes the result.

    ``say`` is called with the progress: preparing, measuring, measured.
    """
    try:
        if engine in PREPARATIONS:
            PREPARATIONS[engine](job)
            return RungResult(outcome="prepared")
        return _measured(job, engine, choices, say)
    except (SkippedError, MissingExtraError) as error:
        return RungResult(outcome="skipped", reason=error.message)
    except TandemError as error:
        return RungResult(outcome="failed", reason=error.message)
    except Exception as error:  # of any runtime: the ladder continues without this rung
        lines = str(error).strip().splitlines() or [""]
        return RungResult(outcome="failed", reason=f"{type(error).__name__}: {lines[0]}")


def _measured(
    job: LadderJob, engine: str, choices: Sequence[RungOptions], say: Callable[[str], None]
) -> RungResult:
    started = time.monotonic()
    say("preparing")
    chosen, ready = best_choice(job, engine, choices)
    _warm_up(ready, job)
    prepared_s = time.monotonic() - started
    say("measuring")
    figures = run_calls(ready.calls, job.asked.seconds, chosen.batch, job.cores)
    say("measured")
    if not job.network.is_random:
        share, num_labelled = top1(ready, job, chosen.batch, of_ensemble=engine == "ensemble")
        figures = figures.model_copy(update={"top1": share, "num_labelled": num_labelled})
    return RungResult(
        outcome="measured",
        chosen=chosen,
        figures=figures,
        prepared_s=round(prepared_s, 1),
        notes=(ready.note(),),
    )


def best_choice(
    job: LadderJob, engine: str, choices: Sequence[RungOptions]
) -> tuple[RungOptions, ReadyNetwork]:
    """Return the choice with the highest throughput in a short run.

    Choices that this machine cannot run are skipped.

    Raises:
        SkippedError: the machine can run none of them.

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
        run = run_calls(ready.calls, TRIAL * job.asked.seconds, options.batch, job.cores)
        if best is None or run.images_per_s > best[0]:
            best = run.images_per_s, options, ready
    if best is None:
        raise SkippedError("; ".join(dict.fromkeys(reasons)))
    return best[1:]


def _warm_up(ready: ReadyNetwork, job: LadderJob) -> None:
    """Run for a while without counting: the first calls allocate, and may compile."""
    for call in ready.calls:
        call()
    run_calls(ready.calls, WARM_UP * TRIAL * job.asked.seconds, 1, job.cores)
