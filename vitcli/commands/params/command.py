"""vitcli params"""

from __future__ import annotations

from typing import Annotated

from vitcli.config.load import load_config
from vitcli.config.request import ModelRequest
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError
from vitcli.ui.figures import draw
from vitcli.ui.options import (
    EncodersOptions,
    Output,
    PlotOption,
    PrintConfigOption,
    Without,
    grouped,
)
from vitcli.ui.tables import show


@grouped
@grouped
def params(
    *,
    models: Annotated[EncodersOptions, Without(("seed", "device", "pos_resize"))],
    output: Output,
    plot: PlotOption = None,
    print_config: PrintConfigOption = False,
) -> None:
    """Where an encoder's parameters, operations and bytes are.

    Arithmetic on the config: nothing is built. --image-size changes what is read,
    and keeps the position table; --set encoder.image_size=384 makes a new table.

    \b
    Examples:
      vitcli params --preset vit-b16
      vitcli params --preset clip-l14 --preset dinov2-l14 --image-size 224
      vitcli params --config mine.yaml --set encoder.depth=24 --json
      vitcli params --weights facebook/dinov2-small
    """
    from vitcli.commands.params.analysis import params as analysis
    from vitcli.config.load import config_yaml
    from vitcli.ui.console import answer_text, answer_width
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    requests = models.to_requests()
    configs = [_config(request) for request in requests]
    if print_config:
        if len(configs) > 1:
            raise VitcliError(f"--print-config prints one config, not {len(configs)}", "name one")
        return answer_text(config_yaml(configs[0]))
    result = analysis(configs, requests[0].image_size, requests[0].dtype)
    if plot:
        from vitcli.commands.params.view import figure

        draw(figure(result), plot)
    from vitcli.commands.params.view import tables

    show(result, output.form, lambda result: tables(result, answer_width()))


def _config(request: ModelRequest) -> ModelConfig:
    """The config asked for; of a checkpoint, what its tensors and settings tell."""
    if request.weights is None:
        return load_config(ModelConfig, request.preset, request.config_file, request.settings)
    from vitcli.model import plan_model
    from vitcli.ui.console import note

    plan, report = plan_model(request)
    note(report.line())
    return plan.config
