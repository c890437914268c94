"""Plots two sets of answers as inline SVG: the shares of classes, and the confidence."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from calibration.drift.comparison import ClassShare
from calibration.evaluation.reports.plots import STYLE, svg_of

COLORS = {"reference": "#4a6fa5", "samples": "#c8703a"}
HEIGHT = 0.38  # of a bar, of the row that a class's two bars share


def class_shares(classes: Sequence[ClassShare]) -> str:
    """Plot each class's share of the images on both sides, as bars."""
    places = np.arange(len(classes))
    values = {
        "reference": [share.reference for share in classes],
        "samples": [share.samples for share in classes],
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.2 + 0.42 * len(classes)))
        axes = figure.add_subplot()
        for (name, shares), shift in zip(values.items(), (-HEIGHT / 2, HEIGHT / 2), strict=True):
            percents = [100 * share for share in shares]
            axes.barh(places + shift, percents, HEIGHT * 0.95, label=name, color=COLORS[name])
        # matplotlib takes no lone surrogates, which JSON's labels may have
        labels = [share.label.encode("utf-8", "replace").decode() for share in classes]
        axes.set_yticks(places, labels)
        axes.invert_yaxis()
        axes.set_xlabel("% of the images")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
        return svg_of(figure)


def confidence(reference: npt.NDArray[np.float64], samples: npt.NDArray[np.float64]) -> str:
    """Plot the cumulative distribution of the confidence; the test's D is the widest gap."""
    sides = {"reference": reference, "samples": samples}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 3.6))
        axes = figure.add_subplot()
        for name, values in sides.items():
            axes.ecdf(values, label=name, color=COLORS[name])
        axes.set_xlim(0, 1)
        axes.set_xlabel("confidence (probability of the first class)")
        axes.set_ylabel("share of images up to it")
        axes.legend(frameon=False, loc="upper left")
        return svg_of(figure)
