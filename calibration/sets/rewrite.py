"""Rewrites a network's graph so that OpenVINO runs it better; its results stay the same."""

import openvino as ov
from openvino import opset13 as ops


def chain_concats(model: ov.Model) -> int:
    """Turn each concatenation that extends an earlier one into "the earlier one and the new input".

    DenseNet concatenates all features so far before every layer: (a, b), (a, b, c), (a, b, c, d)...
    Quantised, OpenVINO's low-precision passes handle every input of every concatenation on its own,
    which is quadratic in the depth of a block. Chained, the INT8 DenseNet169 takes about a quarter
    of the memory and a third of the load time, and runs faster (decision 0015).

    Changes ``model`` in place and returns how many concatenations were rewritten.
    """
    seen: dict[tuple[int, tuple[tuple[str, int], ...]], ov.Node] = {}  # by axis and inputs
    num_rewritten = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Concat":
            continue
        sources = [port.get_source_output() for port in node.inputs()]
        key = tuple((s.get_node().get_friendly_name(), s.get_index()) for s in sources)
        axis = node.get_attributes()["axis"]
        earlier = seen.get((axis, key[:-1]))
        if earlier is None:
            seen[axis, key] = node
            continue
        chained = ops.concat([earlier.output(0), sources[-1]], axis)
        chained.set_friendly_name(node.get_friendly_name() + "/chained")
        for port in node.output(0).get_target_inputs():
            port.replace_source_output(chained.output(0))
        seen[axis, key] = chained
        num_rewritten += 1
    model.validate_nodes_and_infer_types()
    return num_rewritten
