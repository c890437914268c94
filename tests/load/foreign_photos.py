"""Of photographs of other classes than a set's: of how many it is "sure", in process.

    python tests/load/foreign_photos.py PHOTOS [--set imagenette] [--json FILE]

PHOTOS are files whose names begin with their class's WordNet id; those of the set's classes are
left out. No answer to the others can be right.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import machine  # noqa: F401 (makes tests.support importable)
import numpy as np

from models.ensemble import average, tempered
from models.image import read_image
from models.model_set import ModelSet, load_model_set
from models.openvino_network import CompiledNetwork, RuntimeOptions


def count(model_set: ModelSet, photos: list[Path]) -> dict[str, Any]:
    """Count answers by whether they are sure, and whether the members agree."""
    manifest, rule = model_set.manifest, model_set.answer_rule
    if manifest.sure is None:
        raise SystemExit(f"{model_set.name} does not say when it is sure: evaluate --sure-at")
    options = RuntimeOptions(batch_sizes=(1,))
    weights = {m.name: m.weight for m in manifest.members}
    networks = {n: CompiledNetwork(model_set.network_path(n), options) for n in weights}
    counts: Counter[tuple[bool, bool]] = Counter()
    for path in photos:
        data = path.read_bytes()
        rows = {}
        for name, network in networks.items():
            image = read_image(data, manifest.image_of(name).rule)[np.newaxis]
            rows[name] = tempered(network.predict(image), manifest.member(name).temperature)
        mean = average(rows, weights, manifest.temperature)[0]
        counts[bool(rule.is_sure(mean)), rule.agree(row[0] for row in rows.values())] += 1
    return {
        "set": model_set.name,
        "sure_from": manifest.sure.probability,
        "num_photos": len(photos),
        "num_sure": counts[True, True] + counts[True, False],
        "num_sure_and_members_agree": counts[True, True],
        "num_members_agree": counts[True, True] + counts[False, True],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("photos", type=Path)
    parser.add_argument("--set", default="imagenette")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model_set = load_model_set(options.set)
    known = model_set.class_ids or ()
    photos = sorted(p for p in options.photos.iterdir() if p.is_file())
    foreign = [path for path in photos if not path.name.startswith(known)]
    text = json.dumps(count(model_set, foreign), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
