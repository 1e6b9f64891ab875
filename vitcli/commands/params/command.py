"""vitcli params"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from vitcli.config.request import ModelRequest, load_config
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError
from vitcli.ui.figures import Plot, finish
from vitcli.ui.options import (
    EncodersOptions,
    LibraryOption,
    Output,
    PrintConfigOption,
    Without,
    grouped,
)

if TYPE_CHECKING:
    from vitcli.model import Model


@grouped
def params(
    *,
    models: Annotated[EncodersOptions, Without(("adapter", "seed", "device", "pos_resize", "fit"))],
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
    engine: LibraryOption = None,
) -> None:
    """Count an encoder's parameters, operations and bytes by component.

    Computed from the config; no weights are loaded. Operations are for one image of the input
    size, which the preprocessing or --image-size sets. If the position table is stored for another
    size (encoder.image_size), that native size is printed too. An encoder of another library is
    counted from its module, layer by layer.

    \b
    Examples:
      vitcli params --preset vit-b16
      vitcli params --preset clip-l14 --preset dinov2-l14 --image-size 224
      vitcli params --config mine.yaml --set encoder.depth=24 --json
      vitcli params --weights facebook/dinov2-small
      vitcli params --preset timm:resnet50 --preset timm:convnext_tiny
    """
    from vitcli.commands.params.analysis import params as analysis
    from vitcli.config.request import config_yaml
    from vitcli.ui.console import answer_text, answer_width
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    requests = models.to_requests(engine)
    configs, sized = zip(*(_config(request) for request in requests), strict=True)
    if print_config:
        if len(configs) > 1:
            raise VitcliError(
                f"--print-config: prints one config (got {len(configs)} encoders)",
                "name one encoder, e.g. --preset vit-b16",
            )
        if requests[0].by_library:
            raise VitcliError(
                f"--print-config: {configs[0].name} is run by its own library, so it has no config",
                "leave out --print-config",
            )
        return answer_text(config_yaml(configs[0]))
    result = analysis(*sized, image_size=requests[0].image_size, dtype=requests[0].dtype)
    finish(result, output.form, plot, width=answer_width() if output.form == "table" else 10_000)


def _config(request: ModelRequest) -> tuple[ModelConfig, ModelConfig | Model]:
    """The config asked for (of a checkpoint, what its tensors and settings say), also sized.

    Of an encoder of another library the model in place of the second.
    """
    if request.by_library:
        from vitcli.loading import load_model
        from vitcli.ui.console import status

        with status("loading torch and the encoder"):
            model = load_model(request, by_library=True)
        return model.config, model
    if request.weights is None:
        config = load_config(ModelConfig, request.preset, request.config_file, request.settings)
        return config, config
    from vitcli.checkpoints.weights import report_line
    from vitcli.commands.params.analysis import with_known_size
    from vitcli.loading import plan_model
    from vitcli.ui.console import note

    plan, report = plan_model(request)
    note(report_line(report))
    return plan.config, with_known_size(plan.config, plan.preprocess_by)
