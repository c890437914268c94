"""Classifies photos with the Python client, and shows which errors to expect.

    pip install ./client
    python examples/python_client.py photo.jpg other.jpg --url http://127.0.0.1:8000

The client sends a refused request (429) again by itself, after the time that the service names.
"""

import argparse
import sys

from tandem_client import BadImage, Client, TandemError


def main() -> int:
    """Print the three likeliest classes of each photo; return 1 if a file was no image."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("photos", nargs="+")
    arguments.add_argument("--url", default="http://127.0.0.1:8000")
    options = arguments.parse_args()
    status = 0
    with Client(options.url, timeout=30) as client:
        for photo in options.photos:
            try:
                answer = client.classify(photo, top_k=3)
            except BadImage as error:  # this file is at fault: go on with the next
                print(f"{photo}: {error.message}", file=sys.stderr)
                status = 1
                continue
            except TandemError as error:  # the service is: its log has the request id
                print(f"{error.code}: {error.message} ({error.request_id})", file=sys.stderr)
                return 2
            doubt = "not sure, " if answer.sure is False else ""  # None: the service does not say
            print(f"{photo}: {doubt}{answer.timings.total_ms:.0f} ms")
            for prediction in answer.predictions:
                print(f"  {prediction.label:20} {prediction.probability:.3f}")
    return status


if __name__ == "__main__":
    sys.exit(main())
