"""Networks compiled by OpenVINO: sizes, answers, refusals; floats computed as asked, on any CPU."""

import locale
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from app.settings import Settings
from app.stages import classifier
from calibration import offline
from calibration.commands.models import problems_running
from calibration.evaluation import inference
from models import golden, openvino_network
from models.errors import ModelSetError
from models.golden import golden_images
from models.model_set import load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions, kept_locale, read_network
from tests.support.cases import cases
from tests.support.tiny_networks import SIZE, save_model, tiny_model, write_tiny_set

SPLIT = np.float32(2**16 + 1)  # 24 bits of significand, of which 16 go
NOT_ROUNDED = {"Parameter", "Result", "FakeQuantize", "Softmax"}


def rounded_to_bf16(model: ov.Model) -> ov.Model:
    """Return a copy in which the output of every float32 layer is rounded to bf16, on any CPU.

    By float32 arithmetic: Veltkamp's splitting (Dekker 1971, "A floating-point technique for
    extending the available precision"). A CPU's own bf16 kernels fuse layers, and round once only.
    """
    rounded = model.clone()
    for node in rounded.get_ordered_ops():
        is_float = node.get_output_size() == 1 and node.get_output_element_type(0) == ov.Type.f32
        if not is_float or node.get_type_name() in NOT_ROUNDED:
            continue
        output = node.output(0)
        users = output.get_target_inputs()
        scaled = ops.multiply(output, SPLIT)
        high = ops.subtract(scaled, ops.subtract(scaled, output))
        for user in users:
            user.replace_source_output(high.output(0))
    rounded.validate_nodes_and_infer_types()
    return rounded


NHWC = [-1, 8, 8, 3]


@pytest.fixture(scope="module")
def xml(tmp_path_factory):
    folder = tmp_path_factory.mktemp("network")
    save_model(tiny_model(gain=3.0), folder, "tiny")
    return folder / "tiny.xml"


@pytest.fixture(scope="module")
def network(xml) -> CompiledNetwork:
    return CompiledNetwork(xml, RuntimeOptions(batch_sizes=(4, 1, 2, 4)))


def test_all_sizes_are_compiled_at_once_also_on_one_core(xml, monkeypatch):
    """So that no core idles while the last size is compiled: a Gateway that died is back sooner."""
    sizes = (1, 2, 4)
    together = threading.Barrier(len(sizes), timeout=20)
    compile_with = openvino_network.compile_with

    def compiled(*args):
        together.wait()  # raises unless all are here
        return compile_with(*args)

    monkeypatch.setattr(openvino_network, "compile_with", compiled)
    network = CompiledNetwork(xml, RuntimeOptions(num_threads=1, batch_sizes=sizes))
    assert network.batch_sizes == sizes


def images(count: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, (count, SIZE, SIZE, 3), np.uint8)


def expected(batch: np.ndarray) -> np.ndarray:
    exponentials = np.exp(3.0 * batch.mean((1, 2)) / 255)
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_batch_of_any_size_gives_its_own_rows_and_padding_changes_nothing(network, xml, count):
    rows = network.predict(images(count))
    assert (rows.dtype, rows.shape) == (np.float32, (count, 3))
    np.testing.assert_allclose(rows, expected(images(count)), atol=1e-5)
    exact = CompiledNetwork(xml, RuntimeOptions(batch_sizes=(count,)))
    np.testing.assert_allclose(rows, exact.predict(images(count)), atol=1e-6)


@cases("seen", lambda b: b[:, ::-1], lambda b: b[..., ::-1], lambda b: b.transpose(0, 2, 1, 3))
def test_images_that_do_not_lie_in_one_piece(network, seen):
    batch = seen(images(3))
    rows = network.predict(list(batch))
    np.testing.assert_array_equal(rows, network.predict(np.ascontiguousarray(batch)))


def test_neither_an_answer_nor_the_callers_images_are_written_to(network):
    batch = images(2)
    batch.flags.writeable = False  # as Ray hands them over
    first = network.predict(batch)
    before = first.copy()
    network.predict(255 - images(2))
    np.testing.assert_array_equal(first, before)
    np.testing.assert_array_equal(batch, images(2))


def test_batches_out_of_range_and_pixels_that_are_not_bytes_are_refused(network):
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"a batch of {count} images; 1 to 4 are taken"):
            network.predict(images(5)[:count])
    for kind in (np.float32, np.float64, np.int64):  # rather than cast
        with pytest.raises(ValueError, match="takes uint8, 0 to 255"):
            network.predict(images(1).astype(kind))


def test_networks_that_come_and_go_leave_signals_working(xml):
    """Of two OpenVINO Cores, one made before the other ended leaves a freed signal stack."""
    script = f"""
import os, signal
from pathlib import Path
from models.openvino_network import CompiledNetwork, RuntimeOptions
for _ in range(3):
    network = CompiledNetwork(Path({str(xml)!r}), RuntimeOptions(batch_sizes=(1,)))
del network
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
os.kill(os.getpid(), signal.SIGTERM)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, b"heard\n"), ran.stderr


def test_what_the_network_says_of_itself(network):
    assert (network.batch_sizes, network.max_batch_size) == ((1, 2, 4), 4)
    assert network.input_shape == (SIZE, SIZE, 3)
    network.warm_up()
    network.check_fits(SIZE, 3)
    with pytest.raises(ModelSetError, match=r"takes 16x16 and gives 3 classes; .*17x17 and 3"):
        network.check_fits(17, 3)
    with pytest.raises(ModelSetError, match="16x16 and 10: mend the manifest"):
        network.check_fits(SIZE, 10)


def test_a_batch_size_that_comes_and_goes_while_threads_predict(network):
    batch, ends = images(7), threading.Event()
    rows = expected(batch)

    def predict(num: int) -> int:
        rounds = 0
        while not ends.is_set():
            np.testing.assert_allclose(network.predict(batch[:num]), rows[:num], atol=1e-5)
            rounds += 1
        return rounds

    with ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(predict, num) for num in (1, 3, 4)]
        try:
            for _ in range(3):
                network.add_batch_size(8)
                network.add_batch_size(8)  # once is enough
                assert network.batch_sizes == (1, 2, 4, 8)
                np.testing.assert_allclose(network.predict(batch), rows, atol=1e-5)
                network.remove_batch_size(8)
                assert network.batch_sizes == (1, 2, 4)
                with pytest.raises(ValueError, match="a batch of 7 images; 1 to 4 are taken"):
                    network.predict(batch)
        finally:
            ends.set()
    assert all(run.result() for run in runs)


def test_a_bundled_network_answers_the_same_in_batches_of_any_size():
    member = load_model_set("imagenette").network_path("resnet50", "INT8")
    bundled = CompiledNetwork(member, RuntimeOptions(batch_sizes=(1, 8)))
    batch = golden_images(bundled.input_shape[0], 16)
    alone = np.concatenate([bundled.predict(batch[i : i + 1]) for i in range(16)])
    np.testing.assert_allclose(bundled.predict(batch[:8]), alone[:8], atol=1e-6)
    bundled.add_batch_size(16)  # of a backlog
    np.testing.assert_allclose(bundled.predict(batch), alone, atol=1e-6)


def test_threads_are_given_and_pinning_is_off(tmp_path):
    properties = RuntimeOptions(num_threads=3, cache_dir=tmp_path).properties
    assert properties["INFERENCE_NUM_THREADS"] == 3
    assert properties["ENABLE_CPU_PINNING"] is False
    assert properties["CACHE_DIR"] == str(tmp_path)
    assert "CACHE_DIR" not in RuntimeOptions().properties


@cases("name, value", ("num_threads", 0), ("batch_sizes", ()), ("batch_sizes", (1, 0)))
def test_options_out_of_range(name, value):
    with pytest.raises(ModelSetError, match=re.escape(f"{name} is {value}")):
        RuntimeOptions(**{name: value})


def odd(shape: list[int], kind: ov.Type = ov.Type.u8, case: str = "") -> ov.Model:
    """A network of inputs of this shape, or one that is odd in another way."""
    (pixels, means), (others, more) = (head(shape, kind) for _ in "ab")
    inputs, outputs = [pixels], [means]
    if case == "2 out":
        outputs.append(ops.relu(means))
    elif case == "2 in":
        inputs, outputs = [pixels, others], [ops.add(means, more)]
    elif case == "1-D":
        outputs = [ops.reduce_mean(means, np.array([1]), keep_dims=False)]
    return ov.Model(outputs, inputs, "odd")


def head(shape: list[int], kind: ov.Type) -> tuple[ov.Node, ov.Node]:
    pixels = ops.parameter(shape, kind)
    return pixels, ops.reduce_mean(ops.convert(pixels, "f32"), np.array([1, 2]), keep_dims=False)


def rankless() -> ov.Model:
    pixels = ops.parameter(ov.PartialShape.dynamic(), ov.Type.u8)
    return ov.Model([ops.relu(ops.convert(pixels, "f32"))], [pixels], "odd")


@cases(
    "model, says",
    (odd(NHWC, ov.Type.f32), "takes .*float32.*fold the pre"),
    (odd([-1, 3, 8, 8]), r"a member takes u8 \[\?,H,W,3\]"),
    (odd([-1, -1, 8, 3]), "with H and W fixed"),
    (odd([-1, 8, 8, 4]), "a member takes u8"),
    (odd([-1, 8, 3]), "a member takes u8"),
    (rankless(), "a member takes u8"),
    (odd(NHWC, case="2 out"), "has 1 inputs and 2 outputs; a member has one of each"),
    (odd(NHWC, case="2 in"), "has 2 inputs and 1 outputs"),
    (odd(NHWC, case="1-D"), r"a member gives probabilities \[\?,C\]"),
    ids=["float", "NCHW", "any height", "4 channels", "rank 3", "no rank", "2 out", "2 in", "1-D"],
)
def test_a_network_of_another_kind_is_refused(tmp_path, model, says):
    save_model(model, tmp_path, "odd")
    with pytest.raises(ModelSetError, match=says):
        CompiledNetwork(tmp_path / "odd.xml", RuntimeOptions(batch_sizes=(1,)))


def test_compiled_networks_are_kept_between_starts_or_the_cache_done_without(xml, tmp_path, caplog):
    CompiledNetwork(xml, RuntimeOptions(batch_sizes=(1, 2), cache_dir=tmp_path / "new" / "cache"))
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 2
    (tmp_path / "file").write_text("in the way")
    options = RuntimeOptions(batch_sizes=(1,), cache_dir=tmp_path / "file" / "cache")
    assert "CACHE_DIR" not in options.properties
    assert "starts will be slower" in caplog.text
    CompiledNetwork(xml, options).warm_up()


FIRST_TOGETHER = """
import sys, threading
from pathlib import Path
import numpy as np
from models.openvino_network import CompiledNetwork, RuntimeOptions
path, = sys.argv[1:]
networks = [CompiledNetwork(Path(path), RuntimeOptions(batch_sizes=(1,))) for _ in range(2)]
barrier = threading.Barrier(2)
def run(network):
    barrier.wait()
    network.predict(np.zeros((1, *network.input_shape), np.uint8))
threads = [threading.Thread(target=run, args=(network,)) for network in networks]
sys.setswitchinterval(1e-6)
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_two_threads_may_run_their_first_network_at_the_same_time(xml):
    """Without the tensor that ``_core`` makes every third process hangs here, the GIL held."""
    for _ in range(4):
        subprocess.run([sys.executable, "-c", FIRST_TOGETHER, str(xml)], timeout=60, check=True)


@pytest.fixture
def utf8():
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    yield
    locale.setlocale(locale.LC_ALL, before)


@pytest.mark.usefixtures("utf8")
def test_of_blocks_that_overlap_the_last_one_puts_back_what_the_first_had():
    with kept_locale:
        locale.setlocale(locale.LC_ALL, "C")
    assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"
    is_within, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with kept_locale:
            is_within.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    with kept_locale:
        locale.setlocale(locale.LC_ALL, "C")
        thread.start()
        assert is_within.wait(10)
    assert locale.setlocale(locale.LC_CTYPE) == "C"  # not while another may compile
    may_end.set()
    thread.join()
    assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"


@pytest.mark.usefixtures("utf8")
def test_networks_that_are_read_from_the_cache_on_several_threads_leave_the_locale(tmp_path):
    save_model(tiny_model(), tmp_path, "tiny")
    options = RuntimeOptions(num_threads=4, batch_sizes=(1, 2, 3, 4), cache_dir=tmp_path / "cache")
    for _ in range(20):  # it was lost in one of a few
        CompiledNetwork(tmp_path / "tiny.xml", options)
        assert locale.setlocale(locale.LC_CTYPE) == "C.UTF-8"


@pytest.fixture
def other_default():
    """A CPU plugin that would by itself compute in something else than f32.

    Which CPUs take bf16 cannot be changed here; that the default is not f32 can.
    """
    core = openvino_network._core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "ACCURACY"})
    yield
    core.set_property("CPU", {"EXECUTION_MODE_HINT": "PERFORMANCE"})


@pytest.mark.usefixtures("other_default")
def test_floats_are_f32_whatever_the_plugins_default_is():
    model = tiny_model()
    model.reshape([1, SIZE, SIZE, 3])
    alone = openvino_network._core().compile_model(model, "CPU")
    assert alone.get_property("INFERENCE_PRECISION_HINT").get_type_name() != "f32"
    assert CompiledNetwork(tiny_model(), RuntimeOptions(batch_sizes=(1,))).float_type == "f32"


@pytest.mark.parametrize("float_type", ["f32", "bf16"])
def test_openvino_is_always_told_and_bf16_is_only_where_the_cpu_has_it(float_type):
    options = RuntimeOptions(batch_sizes=(1,), float_type=float_type)
    assert options.properties["INFERENCE_PRECISION_HINT"] == float_type
    can = openvino_network._core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    runs = CompiledNetwork(tiny_model(), options).float_type
    assert runs == (float_type if float_type.upper() in {*can, "F32"} else "f32")


def test_the_rounding_of_these_tests_is_that_of_bf16():
    values = np.random.default_rng(4).normal(0, 30, (1, 1000)).astype(np.float32)
    source = ops.parameter([1, 1000], ov.Type.f32)
    model = rounded_to_bf16(ov.Model([ops.relu(source)], [source], "relu"))
    found = openvino_network._core().compile_model(model, "CPU", RuntimeOptions().properties)(
        [values]
    )[0]
    # To nearest, ties to even: add half of what goes, less one where the last kept bit is 0.
    bits = np.maximum(values, 0).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    np.testing.assert_array_equal(found, nearest.astype(np.uint32).view(np.float32))


@pytest.mark.slow  # make test rounds small networks, below
@cases("member, precision", ("resnet50", "FP16"), ("densenet169", "INT8"), ids=str)
def test_the_bundled_networks_pass_the_golden_check_in_bf16(member, precision):
    """So a set that asks for bf16 need not be made anew on the CPU that has it."""
    model_set = load_model_set("imagenette")
    model = read_network(model_set.network_path(member, precision))
    network = CompiledNetwork(rounded_to_bf16(model), RuntimeOptions(batch_sizes=(8,)))
    assert model_set.golden is not None
    golden.check(model_set.golden, member, precision, network)
    # Answers equal to the fourth decimal would prove that nothing was rounded.
    recorded = model_set.golden.answers[member][precision].rows
    assert golden.answer_of(network).rows != recorded


def serve(model_set, precision):
    settings = Settings(model_set=str(model_set.folder), precision=precision, compile_cache=None)
    classifier.Classifier(settings, "sure")


def bound(model_set, precision):
    offline.InProcessPipeline(model_set, precision, offline.Setup(1, 1, 1))


def verify(model_set, _):
    assert problems_running(model_set) == []


def evaluate(model_set, precision):
    inference.Networks(model_set, (precision,))


@cases(
    "use, precision, float_type",
    (serve, "INT8", "bf16"),
    (serve, "FP16", "bf16"),
    (bound, "INT8", "bf16"),
    (offline.OneImage, "INT8", "bf16"),
    (verify, "INT8", "bf16"),
    (evaluate, "INT8", "bf16"),
    (evaluate, "FP16", "f32"),  # what INT8 is compared with is the same for every set
)
def test_a_set_is_run_in_the_float_type_it_asks_for(
    tmp_path, monkeypatch, use, precision, float_type
):
    folder = write_tiny_set(tmp_path / "tiny", precision=precision, float_type="bf16")
    asked: list[str] = []

    class Recorded(CompiledNetwork):
        def __init__(self, network, options):
            asked.append(options.float_type)
            super().__init__(network, options)

    monkeypatch.setattr("models.openvino_network.CompiledNetwork", Recorded)
    use(load_model_set(str(folder)), precision)
    assert set(asked) == {float_type}


def test_sets_that_differ_in_the_float_type_are_not_taken_for_the_same(tmp_path):
    folders = (write_tiny_set(tmp_path / kind, float_type=kind) for kind in ("f32", "bf16"))
    assert len({load_model_set(str(folder)).fingerprint() for folder in folders}) == 2
