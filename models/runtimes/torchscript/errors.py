"""The error of TorchScript that is not taken, and what its owner can do instead."""

from models.errors import ModelSetError

INSTEAD = (
    "Save the network with torch.export.save(torch.export.export(module.eval(), (example,), "
    "dynamic_shapes=...), 'net.pt2'), or export ONNX, and give that"
)


class ScriptError(ModelSetError):
    """A TorchScript file that is damaged, or that does more than compute on tensors."""

    code = "torchscript"
