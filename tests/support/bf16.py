"""What a network answers where floats are bf16, computed on any CPU.

bfloat16 is float32 with eight bits of significand. OpenVINO computes in it only where the CPU has
it, so here every layer's output is rounded to eight bits by float32 arithmetic (Veltkamp's
splitting; Dekker 1971, "A floating-point technique for extending the available precision"), weights
like all else. It is the worst case: layers that a CPU's bf16 kernels fuse are rounded once only.
"""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

SPLIT = np.float32(2**16 + 1)  # 24 bits of significand, of which 16 go
NOT_ROUNDED = {"Parameter", "Result", "FakeQuantize", "Softmax"}


def rounded_to_bf16(model: ov.Model) -> ov.Model:
    """Return a copy in which the output of every float32 layer is rounded to bf16."""
    rounded = model.clone()
    for node in rounded.get_ordered_ops():
        is_float = node.get_output_size() == 1 and node.get_output_element_type(0) == ov.Type.f32
        if not is_float or node.get_type_name() in NOT_ROUNDED:
            continue
        output = node.output(0)
        users = output.get_target_inputs()
        scaled = ops.multiply(output, SPLIT)
        high = ops.subtract(scaled, ops.subtract(scaled, output))
        for user in users:
            user.replace_source_output(high.output(0))
    rounded.validate_nodes_and_infer_types()
    return rounded
