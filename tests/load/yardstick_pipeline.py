"""The pure half of the yardstick: files to answers, batch by batch (tests/load/yardstick.py)."""

import json
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
import openvino as ov

from models.model_set import ModelSet

SIZES = (1, 2, 4, 8, 16)


class Network:
    """One member, compiled for each size of a batch."""

    def __init__(self, core: ov.Core, path: str, cores: int) -> None:
        options = {
            "PERFORMANCE_HINT": "THROUGHPUT",
            "NUM_STREAMS": cores,
            "INFERENCE_NUM_THREADS": cores,
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_PRECISION_HINT": "f32",
        }
        self._compiled = {}
        for size in SIZES:
            model = core.read_model(path)
            model.reshape([size, *list(model.input().partial_shape)[1:]])
            self._compiled[size] = core.compile_model(model, "CPU", options)

    def requests(self) -> dict[int, ov.InferRequest]:
        """Return an infer request for each size."""
        return {size: model.create_infer_request() for size, model in self._compiled.items()}


class Pipeline:
    """Decodes a batch, runs all members, averages, writes JSON; one for each thread.

    Without networks every answer is the same, and costs nothing but its decoding and its JSON.
    """

    def __init__(self, model_set: ModelSet, networks: Sequence[Network]) -> None:
        manifest = model_set.manifest
        images = [manifest.image_of(member.name) for member in manifest.members]
        self._inputs = [(image.input_size, image.resize_shorter) for image in images]
        self._labels, self._name = model_set.labels, model_set.name
        self._members = [member.name for member in manifest.members]
        weights = np.array([member.weight for member in manifest.members], np.float32)
        self._weights = (weights / weights.sum())[:, np.newaxis, np.newaxis]  # (M, 1, 1)
        self._requests = [network.requests() for network in networks]
        self._pixels = {
            (n, own): np.zeros((n, own[0], own[0], 3), np.uint8)
            for n in SIZES
            for own in set(self._inputs)
        }
        row = np.full(manifest.num_classes, 1 / manifest.num_classes, np.float32)
        self._constant = np.broadcast_to(row, (len(self._members), SIZES[-1], len(row)))

    def answer(self, batch: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        """Return JSON for each file and its top-k; None for what is no image."""
        size = next(size for size in SIZES if size >= len(batch))
        is_image = [self._decode(body, size, i) for i, (body, _) in enumerate(batch)]
        members = self._infer(size)  # (M, N, C)
        rows = (members * self._weights).sum(axis=0)  # (N, C)
        order = np.argsort(-rows, axis=1)[:, : max(top_k for _, top_k in batch)]
        firsts = members.argmax(axis=2)  # (M, N)
        return [
            self._told(rows[i], order[i, :top_k], members[:, i], firsts[:, i]) if good else None
            for i, (good, (_, top_k)) in enumerate(zip(is_image, batch, strict=True))
        ]

    def _decode(self, body: bytes, batch_size: int, place: int) -> bool:
        """Resize the shorter side and take the central square, for each kind of input."""
        image = cv2.imdecode(np.frombuffer(body, np.uint8), cv2.IMREAD_COLOR) if body else None
        if image is None:
            return False
        for side, shorter in set(self._inputs):
            scale = shorter / min(image.shape[:2])
            height, width = (round(length * scale) for length in image.shape[:2])
            small = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
            top, left = (height - side) // 2, (width - side) // 2
            into = self._pixels[batch_size, (side, shorter)][place]
            into[:] = small[top : top + side, left : left + side]
        return True

    def _infer(self, size: int) -> np.ndarray:
        if not self._requests:
            return self._constant
        requests = [of_size[size] for of_size in self._requests]
        for request, own in zip(requests, self._inputs, strict=True):
            request.start_async([self._pixels[size, own]], share_inputs=True)
        for request in requests:
            request.wait()
        return np.stack([request.get_output_tensor(0).data for request in requests])

    def _told(self, row, order, members, firsts):
        answer: dict[str, Any] = {
            "model_set": self._name,
            "predictions": [
                {"index": i, "label": self._labels[i], "probability": float(row[i])}
                for i in order.tolist()
            ],
            "members": {
                name: {"label": self._labels[first], "probability": float(one[first])}
                for name, one, first in zip(self._members, members, firsts.tolist(), strict=True)
            },
        }
        return json.dumps(answer).encode()
