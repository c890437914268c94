"""Load by Locust, for those who use it: photographs over HTTP, by the ways that /v1 and /v2 have.

    pip install 'tandem-serve[study]'
    TANDEM_PHOTOS=photos locust -f tests/load/locustfile.py --host http://127.0.0.1:8000

``--tags raw``, ``form`` or ``v2`` takes one of the ways. A key of the service's is read from the
file that TANDEM_KEY_FILE names.
"""

import json
import os
import random
from pathlib import Path

from locust import FastHttpUser, constant, tag, task

FILES_IN_A_FORM = 16
HEADER_LENGTH = "Inference-Header-Content-Length"
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}


def photos() -> list[bytes]:
    """Return the files of the folder TANDEM_PHOTOS."""
    folder = Path(os.environ.get("TANDEM_PHOTOS", "photos"))
    found = sorted(f for f in folder.glob("**/*") if f.suffix.lower() in SUFFIXES)
    if not found:
        raise SystemExit(f"no JPEG, PNG or WebP in {folder}; say where by TANDEM_PHOTOS=FOLDER")
    return [file.read_bytes() for file in found]


PHOTOS = photos()


class Caller(FastHttpUser):
    """Sends one request after another on a connection that it keeps."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.model = self.client.get("/v1/models", headers=self._key()).json()["model_set"]

    @tag("raw")
    @task
    def file_as_the_body(self) -> None:
        self.client.post(
            "/v1/classify", data=random.choice(PHOTOS), headers=self._key(), name="raw"
        )

    @tag("form")
    @task
    def files_as_a_form(self) -> None:
        chosen = random.choices(PHOTOS, k=FILES_IN_A_FORM)
        head = b'--limit\r\nContent-Disposition: form-data; name="files"; filename="%d"\r\n\r\n'
        parts = [head % n + photo + b"\r\n" for n, photo in enumerate(chosen)]
        headers = {"Content-Type": "multipart/form-data; boundary=limit", **self._key()}
        self.client.post(
            "/v1/classify", data=b"".join([*parts, b"--limit--\r\n"]), headers=headers, name="form"
        )

    @tag("v2")
    @task
    def open_inference(self) -> None:
        photo = random.choice(PHOTOS)
        raw = len(photo).to_bytes(4, "little") + photo
        tensor = {"name": "image", "datatype": "BYTES", "shape": [1]}
        tensor["parameters"] = {"binary_data_size": len(raw)}
        head = json.dumps({"inputs": [tensor]}).encode()
        self.client.post(
            f"/v2/models/{self.model}/infer",
            data=head + raw,
            headers={HEADER_LENGTH: str(len(head)), **self._key()},
            name="v2",
        )

    @staticmethod
    def _key() -> dict[str, str]:
        file = os.environ.get("TANDEM_KEY_FILE")
        if not file:
            return {}
        return {"Authorization": f"Bearer {Path(file).read_text('ascii').strip()}"}
