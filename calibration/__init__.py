"""Makes and measures model sets: training, conversion, INT8 quantisation, accuracy evaluation.

It trains the bundled set (torch, extra ``train``) and converts networks to OpenVINO IR with the
preprocessing folded in. It quantises with NNCF and measures accuracy (extra ``calibrate``). It
imports :mod:`models`, never :mod:`app`.
"""

import models  # noqa: F401 (before openvino and nncf, which report their use without it)
