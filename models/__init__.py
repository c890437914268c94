"""Model sets and the pure code that runs them: manifest, image, runtime, ensemble.

It imports NumPy, SciPy, OpenCV and OpenVINO, and pydantic, PyYAML and platformdirs for manifests
and folders. httpx (a set's URL) and an extra's package (a member's runtime) are imported when they
are needed. Serving, calibration and evaluation share these functions, so an accuracy measured
offline holds for serving. Never imports ray, torch, nncf or fastapi.
"""

import sys

# OpenVINO and NNCF use this package to report to Google Analytics, with an id in the user's home
# and a thread that stays. Both work without it. None makes its import fail; this file runs before
# either is imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
