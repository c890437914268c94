"""Imports a safetensors state dict of a torchvision classification network.

safetensors contain only tensors, so this project builds the architecture.
"""

from pathlib import Path

from calibration.sets.classes import select_classes
from calibration.sets.convert import convert_module
from calibration.sets.file_options import FileOptions
from calibration.sets.import_network import Imported
from calibration.sets.networks import build_network, load_weights
from calibration.sets.task import ENDINGS, gives
from models.errors import ModelSetError

USUAL_SIZE = 224  # px, for ImageNet's networks


def import_state(path: Path, architecture: str, num_classes: int, options: FileOptions) -> Imported:
    """Build torchvision's ``architecture``, load the weights, and convert it to IR.

    Args:
        path: safetensors, FP16 or FP32.
        architecture: torchvision's name.
        num_classes: of the set; a member with its own class ids has their number.
        options: as for other files; the input size is 224 px by default.

    Raises:
        ModelSetError: torchvision has no such network, or the weights do not fit it.

    """
    classes, size = options.classes, options.input_size or USUAL_SIZE
    num = num_classes if classes is None else len(classes.own)
    module = build_network(architecture, num, size)
    try:
        load_weights(module, path)
    except ModelSetError:
        raise
    except Exception as error:  # safetensors and torch raise errors of their own
        problem = str(error).strip().partition("\n")[0]
        raise ModelSetError(f"{path} are no weights of {architecture}: {problem}") from error
    task = options.task or "classification"  # torchvision's networks end in logits
    model = convert_module(module, architecture, size, options.normalisation, task)
    if classes is not None:
        model = select_classes(model, classes, path, task)
    facts = f"takes {options.normalisation.formula}; {gives(task, ENDINGS[task])}"
    doubt = options.normalisation.doubt
    return Imported(model, size, num_classes, "FP16", task=task, facts=facts, doubt=doubt)
