"""Model sets and the pure code that runs them: manifest, image, runtime, ensemble.

NumPy, SciPy, OpenCV and OpenVINO only; ``runtimes`` has an extra, imported when a member needs it.
Serving, calibration and evaluation share these functions, so a number measured offline is the
number served. Never imports ray, torch, nncf or fastapi.
"""

import sys

# OpenVINO and NNCF report each use to Google Analytics by way of this package, with an identity
# that they keep in the user's home, and a thread that stays. Both do without it where it cannot be
# imported, and None says so. This file runs before either is imported.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
