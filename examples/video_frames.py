"""Classifies every n-th frame of a video and prints when the label changes.

    pip install ./client opencv-python-headless
    python examples/video_frames.py film.mp4 --every 10

OpenCV decodes frames to BGR arrays; the client sends them as PNG, several at a time.
"""

import argparse
from collections.abc import Iterator

import cv2
import numpy as np

from tandem_client import Client


def frames(path: str, every: int) -> Iterator[np.ndarray]:
    """Yield every n-th frame, (H, W, 3) uint8 BGR."""
    video = cv2.VideoCapture(path)
    if not video.isOpened():
        raise SystemExit(f"{path} is no video that OpenCV can read")
    number = 0
    while video.grab():  # cheaper than read(): frames that are left out are not converted
        if number % every == 0:
            is_read, frame = video.retrieve()
            if is_read:
                yield frame
        number += 1
    video.release()


def main() -> None:
    """Print the number of each frame where another scene begins."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("video")
    arguments.add_argument("--every", type=int, default=10)
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    options = arguments.parse_args()
    last = None
    with Client(options.url) as client:
        chosen = frames(options.video, options.every)
        for result in client.classify_many(chosen, channels="bgr", concurrency=4):
            answer = result.get()  # raises if the frame has none
            if answer.label != last:
                last = answer.label
                print(f"frame {result.index * options.every}: {last} {answer.probability:.3f}")


if __name__ == "__main__":
    main()
