"""The command line of ``tandem evaluate``: its options and their help."""

from pathlib import Path
from typing import Annotated

import typer

from calibration.commands.options import JsonFile, ModelDirs, SetName
from models.extras import needs_extra

Images = Annotated[
    Path,
    typer.Option(
        help="ImageFolder (DIR/<class>/<file>), or a CSV of file,label; of a multi-label set "
        "file,label;label"
    ),
]
Url = Annotated[
    str | None,
    typer.Option(help="also through this running service; it must answer as in process"),
]
KeyFile = Annotated[
    Path | None,
    typer.Option(help="holds that service's key, if it wants one  (default: TANDEM_API_KEY)"),
]
Subsets = Annotated[
    bool,
    typer.Option("--subsets", help="compare every ensemble of the members: accuracy against cost"),
]
Plot = Annotated[Path | None, typer.Option(help="with --subsets: draw them, FILE.svg or FILE.png")]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="fit a temperature for each member and one for the average on half of the images, "
        "judge on the others, and write them into the manifest",
    ),
]
SureAt = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=0.999,
        help="choose from which probability on half of the images show that this share of answers "
        "is right, judge on the others, and write it into the manifest",
    ),
]
MaxImages = Annotated[
    int,
    typer.Option(
        min=0, show_default=False, help="a random sample this large, not recorded  (default: all)"
    ),
]
RecordOption = Annotated[
    bool, typer.Option(help="keep the result in the set's manifest, where serve reads it")
]
Html = Annotated[Path | None, typer.Option(help="write a page with plots")]


def evaluate(
    name: SetName,
    images: Images,
    url: Url = None,
    subsets: Subsets = False,
    plot: Plot = None,
    calibrate: Calibrate = False,
    sure_at: SureAt = None,
    max_images: MaxImages = 0,
    record: RecordOption = True,
    json_file: JsonFile = None,
    html: Html = None,
    model_dir: ModelDirs = None,
    key_file: KeyFile = None,
) -> None:
    """Measure every member and the ensemble, float and INT8, on labelled images.

    Top-1 and more; of a multi-label set mean average precision, micro and macro F1.

    Exit code 1: INT8 lost more than the set's max_drop, or the live service answered otherwise.
    """
    with needs_extra("calibrate", "evaluate"):
        from calibration.commands.evaluate_options import EvaluateOptions
        from calibration.commands.evaluate_run import run_evaluation
    options = EvaluateOptions(
        images=images,
        url=url,
        max_images=max_images,
        is_recorded=record,
        json_file=json_file,
        html=html,
        model_dirs=tuple(model_dir or ()),
        key_file=key_file,
        has_subsets=subsets,
        plot=plot,
        is_calibrated=calibrate,
        sure_at=sure_at,
    )
    if not run_evaluation(name, options):
        raise typer.Exit(1)
