"""Makes and measures model sets: training, conversion, INT8 quantisation, accuracy evaluation.

Training of the bundled set (torch, extra ``train``), conversion to OpenVINO IR with the
preprocessing folded in, quantisation with NNCF and the measurement of accuracy (extra
``calibrate``). Imports :mod:`models`, never :mod:`app`.
"""

import models  # noqa: F401 (before openvino and nncf, which report their use without it)
