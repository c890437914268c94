"""Model sets and the pure code that runs them: manifest, image, runtime, ensemble.

NumPy, SciPy, OpenCV and OpenVINO only; ``runtimes`` has two extras, imported when a member needs
them.
Serving, calibration and evaluation share these functions, so a number measured offline is the
number served. Never imports ray, nncf or fastapi.
"""
