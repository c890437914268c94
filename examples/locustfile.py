"""Loads a service with Locust: photographs over HTTP, in the ways that /v1 and /v2 have.

    pip install '.[locust]'
    TANDEM_PHOTOS=photos locust -f examples/locustfile.py --host http://127.0.0.1:8000

``--tags raw``, ``form`` or ``v2`` takes one of the ways. TANDEM_KEY_FILE names the file with a key.
"""

import os
import random
from pathlib import Path

from locust import FastHttpUser, constant, tag, task

FILES_IN_A_FORM = 16
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}

folder = Path(os.environ.get("TANDEM_PHOTOS", "photos"))
PHOTOS = [f.read_bytes() for f in sorted(folder.rglob("*")) if f.suffix.lower() in SUFFIXES]
if not PHOTOS:
    raise SystemExit(f"no JPEG, PNG or WebP in {folder}; name a folder by TANDEM_PHOTOS=FOLDER")


class Caller(FastHttpUser):
    """Sends one request after another on a connection that it keeps."""

    wait_time = constant(0)

    def on_start(self) -> None:
        self.key = {}
        if file := os.environ.get("TANDEM_KEY_FILE"):
            self.key = {"Authorization": f"Bearer {Path(file).read_text('ascii').strip()}"}
        self.model = self.client.get("/v1/models", headers=self.key).json()["model_set"]

    @tag("raw")
    @task
    def file_as_the_body(self) -> None:
        self.client.post("/v1/classify", data=random.choice(PHOTOS), headers=self.key, name="raw")

    @tag("form")
    @task
    def files_as_a_form(self) -> None:
        head = b'--limit\r\nContent-Disposition: form-data; name="files"; filename="%d"\r\n\r\n'
        chosen = random.choices(PHOTOS, k=FILES_IN_A_FORM)
        parts = [head % n + photo + b"\r\n" for n, photo in enumerate(chosen)]
        headers = {"Content-Type": "multipart/form-data; boundary=limit", **self.key}
        body = b"".join([*parts, b"--limit--\r\n"])
        self.client.post("/v1/classify", data=body, headers=headers, name="form")

    @tag("v2")
    @task
    def open_inference(self) -> None:
        headers = {"Inference-Header-Content-Length": "0", **self.key}  # the body is the file
        path = f"/v2/models/{self.model}/infer"
        self.client.post(path, data=random.choice(PHOTOS), headers=headers, name="v2")
