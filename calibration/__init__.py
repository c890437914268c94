"""From float networks to the committed INT8 sets, and the proof that they are still good.

Training of the bundled set (torch, extra ``train``), conversion to OpenVINO IR with the
preprocessing folded in, quantisation with NNCF and the measurement of accuracy (extra
``calibrate``). Imports :mod:`models`, never :mod:`app`.
"""
