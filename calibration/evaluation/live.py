"""Compares a running service's answers with those of the same networks in this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tandem_client.exchange import cause_of, checked_url, is_loopback

from app.access import key_headers
from calibration.datasets import ImageFile, LabelledImage
from calibration.evaluation.inference import AnsweredBatch
from models.ensemble import Probabilities, above, average
from models.errors import ModelSetError
from models.manifest import ENSEMBLE
from models.model_set import ModelSet, offline_precision
from models.record import Precision

NUM_CONNECTIONS = 16
TRAFFIC_PATH, SHADOW_S = "/v1/traffic", 300  # a version is loaded meanwhile
NUM_TRIES = 5  # for an image that is answered with 429, or not at all
# Kernels for other batch sizes may round differently: two classes this near may swap places.
TIE = 1e-3
OWN_STAGES = ("preprocess", "combine")  # the operator's functions in /v1/models
MAX_DIFFERENCE = 0.01  # of a first class's probability


@dataclass
class LiveResult:
    """Counts of a service's answers; ``differences`` names every image with another answer."""

    url: str
    num_images: int = 0
    num_right: dict[str, int] = field(default_factory=dict)
    num_right_top5: int = 0  # of the ensemble
    num_same: int = 0
    num_alone: int = 0  # answered by the fast plan without all members
    num_partial: int = 0  # these, and those that lack a member for another reason
    max_difference: float = 0.0  # of any first class's probability
    differences: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        """Whether the service gave every image the same answer as this process."""
        return self.num_images > 0 and not self.differences


def into_shadow(url: str, model_set: ModelSet, key_file: Path | None = None) -> str:
    """Put a set's newest version into the shadow of the service at ``url``; return its name.

    Raises :class:`ModelSetError` if the service does not answer, or refuses the version.
    """
    name = f"{model_set.name}@{model_set.fingerprint(offline_precision(model_set))}"
    with _client(url, key_file, SHADOW_S, "--shadow") as client:
        try:
            seen = client.get(TRAFFIC_PATH)
            shares = (
                {key: seen.json()[key] for key in ("shares", "revision")}
                if seen.is_success
                else None
            )
            answer = client.put(TRAFFIC_PATH, json=shares | {"shadow": name}) if shares else seen
            content = answer.json()
        except httpx.HTTPError as error:
            raise ModelSetError(f"{url} does not answer: {cause_of(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ModelSetError(f"{url} does not answer as Tandem does") from error
    if not answer.is_success:
        raise ModelSetError(
            f"{name} is made, and {url} does not take it into its shadow: "
            f"{content.get('error', {}).get('message', answer.status_code)}"
        )
    return name


def _client(
    url: str, key_file: Path | None, timeout_s: float, option: str = "--url"
) -> httpx.Client:
    try:
        address = checked_url(url)
    except ValueError as error:
        raise ModelSetError(f"{option}: {error}") from error
    return httpx.Client(
        base_url=address,
        timeout=timeout_s,
        headers=key_headers(key_file),
        limits=httpx.Limits(max_connections=NUM_CONNECTIONS),
        trust_env=not is_loopback(url),  # HTTP_PROXY would get the photos and the key
    )


class LiveService:
    """A running service; :meth:`observe` compares its answers with each batch."""

    may_be_empty = False  # an answer's list of predictions

    def __init__(self, url: str, model_set: ModelSet, key_file: Path | None = None) -> None:
        self._client = _client(url, key_file, 60)
        self._pool = ThreadPoolExecutor(NUM_CONNECTIONS, "live")
        self._lock = threading.Lock()
        self._top_k = min(5, model_set.manifest.num_classes)
        self._weights, self._trust = model_set.manifest.weights, model_set.trust
        self._plan = model_set.manifest.fast_plan
        self.result = LiveResult(url)
        self.precision: Precision = self._check_is(model_set)

    def __enter__(self) -> "LiveService":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _check_is(self, model_set: ModelSet) -> Precision:
        """Return the served precision; raise :class:`ModelSetError` if another set is served."""
        url = self.result.url
        try:
            models = self._client.get("/v1/models")
            if models.status_code == 401:
                raise ModelSetError(f"{url} wants a key, or another one; give --key-file")
            answer = models.raise_for_status().json()
            served = {m["name"]: m["precision"] for m in answer["members"]}
            facts = (answer["model_set"], answer["labels"])
            asked = {key: answer[key] for key in OWN_STAGES if answer.get(key)}
            of_set = {"preprocess": model_set.manifest.preprocess}
            own = [f"{key}: {name}" for key, name in asked.items() if of_set.get(key) != name]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            is_lost = isinstance(error, httpx.TransportError)
            reason = cause_of(error) if is_lost else type(error).__name__
            raise ModelSetError(
                f"{url}/v1/models does not answer as Tandem does ({reason}); "
                "is the service running? tandem serve"
            ) from error
        expected = (model_set.name, list(model_set.labels))
        names = {m.name for m in model_set.manifest.members}
        if facts != expected or served.keys() != names:
            raise ModelSetError(
                f"{url} serves {facts[0]} ({', '.join(served)}), not this {model_set.name} "
                f"({', '.join(sorted(names))}); evaluate what it serves, or serve this set"
            )
        self.check_served(answer, model_set)
        if own:
            raise ModelSetError(
                f"{url} serves with functions of its operator's own ({', '.join(own)}), which this "
                "process does not run: evaluate a service without them"
            )
        return "INT8" if "INT8" in served.values() else "FP16"  # some members may be float only

    def check_served(self, answer: dict[str, Any], model_set: ModelSet) -> None:
        """Raise :class:`ModelSetError` unless the service's task is the set's."""
        there, here = answer.get("task", "classification"), model_set.manifest.task
        if there != here:
            raise ModelSetError(
                f"{self.result.url} serves {model_set.name} as {there}, here it is {here}: serve "
                "this set, or evaluate that one"
            )

    def observe(self, batch: AnsweredBatch[Any]) -> None:
        """Send the batch's files and compare the service's answers with the networks'."""
        bodies = list(self._pool.map(self._ask, batch.data))
        refused = list(self._pool.map(self._is_refused, [image for image, _ in batch.unreadable]))
        with self._lock:
            self.result.num_images += len(bodies)
            for index, (image, body) in enumerate(zip(batch.images, bodies, strict=True)):
                rows = {name: p[index] for name, p in batch.probabilities[self.precision].items()}
                said = [body["problem"]] if "problem" in body else []
                problems = said or self.problems_of(image, body, rows)
                self.result.num_same += not problems
                if problems:
                    self.result.differences.append(f"{image.path}: {'; '.join(problems)}")
            for (image, _), is_same in zip(batch.unreadable, refused, strict=True):
                if not is_same:
                    self.result.differences.append(f"{image.path}: unreadable here, not there")

    def _ask(self, data: bytes) -> dict[str, Any]:
        problem = ""
        for attempt in range(NUM_TRIES):
            if attempt:
                time.sleep(0.1 * 2**attempt)
            try:
                params = {"top_k": self._top_k}
                answer = self._client.post("/v1/classify", content=data, params=params)
                if answer.status_code == 200:
                    return self._checked(answer)
                problem = answer.text[:300]
                if answer.status_code not in (429, 503, 504):
                    break
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
        return {"problem": problem}

    def _is_refused(self, image: ImageFile) -> bool:
        try:
            return "problem" in self._ask(image.path.read_bytes())
        except OSError:
            return True  # the file itself cannot be read

    def problems_of(
        self, image: LabelledImage, body: dict[str, Any], rows: dict[str, Probabilities]
    ) -> list[str]:
        """Count the right classifiers; return an answer's differences from the networks'."""
        result = self.result
        live = {name: member["predictions"] for name, member in body["members"].items()}
        skipped, missing = body.get("skipped_members"), body.get("missing_members", ())
        if skipped or missing:
            result.num_alone += bool(skipped)
            result.num_partial += 1
            rows = {name: row for name, row in rows.items() if name in live}
            asked = len(body.get("asked", ()))
            step = self._plan.step_of(asked) if self._plan is not None and not missing else None
            temperature = self._trust.of(rows, step).temperature
            each = {name: row[None] for name, row in rows.items()}
            rows[ENSEMBLE] = average(each, self._weights, temperature)[0]
        live[ENSEMBLE] = body["predictions"]
        problems = [f"{name} did not answer" for name in missing]
        for name, row in rows.items():
            first = live[name][0]
            right = result.num_right.setdefault(name, 0)
            result.num_right[name] = right + (first["index"] == image.class_index)
            if problem := self._difference(first, row):
                problems.append(f"{name}: {problem}")
        top5 = [prediction["index"] for prediction in live[ENSEMBLE][:5]]
        result.num_right_top5 += image.class_index in top5
        return problems

    def _difference(self, first: dict[str, Any], row: Probabilities) -> str | None:
        here, there = int(row.argmax()), int(first["index"])
        off = abs(float(first["probability"]) - float(row[there]))
        self.result.max_difference = max(self.result.max_difference, off)
        if here != there and float(row[here] - row[there]) > TIE:
            return f"class {there} live, {here} in process"
        if off <= MAX_DIFFERENCE:
            return None
        return f"probability {first['probability']:.4f} live, {float(row[there]):.4f} in process"

    def _checked(self, answer: httpx.Response) -> dict[str, Any]:
        try:
            body = answer.json()
            lists = [body["predictions"], *(m["predictions"] for m in body["members"].values())]
            each_of = [each for listed in lists for each in listed]
            if (self.may_be_empty or all(lists)) and all(
                isinstance(each["index"], int) and float(each["probability"]) >= 0
                for each in each_of
            ):
                return dict(body)
        except (KeyError, TypeError, AttributeError, ValueError):
            pass
        return {"problem": f"no answer as Tandem gives: {answer.text[:200]}"}


class MultiLabelLiveService(LiveService):
    """A running service with a multi-label set.

    In its result ``num_right`` counts images with exactly the right labels.
    """

    may_be_empty = True

    def __init__(self, url: str, model_set: ModelSet, key_file: Path | None = None) -> None:
        super().__init__(url, model_set, key_file)
        self._top_k = model_set.manifest.num_classes  # so that every label is listed
        threshold = model_set.manifest.threshold
        assert threshold is not None  # the set is multi-label
        self._threshold = threshold

    def check_served(self, answer: dict[str, Any], model_set: ModelSet) -> None:
        """Raise unless the service lists labels from the set's threshold on."""
        super().check_served(answer, model_set)
        there, here = answer.get("threshold"), model_set.manifest.threshold
        if there != here:
            raise ModelSetError(
                f"{self.result.url} serves {model_set.name} with a threshold of {there}, here it "
                f"is {here}: serve this set, or evaluate that one"
            )

    def problems_of(
        self, image: Any, body: dict[str, Any], rows: dict[str, Probabilities]
    ) -> list[str]:
        """Count the right classifiers; return an answer's differences from the networks'."""
        result = self.result
        live = {name: member["predictions"] for name, member in body["members"].items()}
        live[ENSEMBLE] = body["predictions"]
        problems = []
        for name, row in rows.items():
            if name not in live:  # left out by the service's answer_policy
                problems.append(f"{name} did not answer")
                continue
            listed = {each["index"]: float(each["probability"]) for each in live[name]}
            is_right = listed.keys() == set(image.classes)
            result.num_right[name] = result.num_right.get(name, 0) + is_right
            if problem := self._other(listed, row):
                problems.append(f"{name}: {problem}")
        return problems

    def _other(self, listed: dict[int, float], row: Probabilities) -> str | None:
        here = set(np.flatnonzero(above(row, self._threshold)).tolist())
        for index in sorted(here ^ listed.keys()):
            if not index < len(row) or abs(float(row[index]) - self._threshold) > TIE:
                where = "in process alone" if index in here else "live alone"
                return f"label {index} is listed {where}"
        for index, score in listed.items():
            off = abs(score - float(row[index]))
            self.result.max_difference = max(self.result.max_difference, off)
            if not off <= MAX_DIFFERENCE:
                return f"score {score:.4f} of label {index} live, {float(row[index]):.4f} here"
        return None
