"""The counts are checks: a model is the document's when trainable, tensors and moving statistics all agree."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shoal import models
from shoal.errors import SettingsContradict


def moving_statistics(model: torch.nn.Module) -> int:
    return sum(buffer.numel() for name, buffer in model.named_buffers() if "running_" in name)


@pytest.mark.parametrize("name", models.names())
def test_model_has_exactly_the_parameters_tensors_and_moving_statistics_of_its_spec(name: str) -> None:
    spec = models.spec(name)
    model = models.build(name)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trainable) == spec.trainable
    assert len(trainable) == spec.tensors
    assert moving_statistics(model) == spec.moving_statistics


@pytest.mark.parametrize("layers", [20, 32, 44, 56, 110])
def test_cifar_resnets_published_figure_is_trainable_plus_moving_statistics_plus_the_step_counter(layers: int) -> None:
    spec = models.spec(f"resnet{layers}")
    assert spec.published == spec.trainable + spec.moving_statistics + 1


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("mlp21m", 21_157_101),
        ("mobilenetv2", 2_236_682),
        ("resnet50_cifar", 23_555_082),
        ("resnet20", 271_164),
        ("resnet32", 466_492),
        ("resnet44", 661_820),
        ("resnet56", 857_148),
        ("resnet110", 1_736_124),
    ],
)
def test_published_figures_are_the_documents(name: str, figure: int) -> None:
    assert models.spec(name).published == figure


@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.slow) if it in ("resnet110", "mobilenetv2") else it for it in models.names()],
)
def test_one_step_at_the_real_input_size_gives_every_parameter_a_finite_gradient(name: str) -> None:
    torch.manual_seed(0)
    spec = models.spec(name)
    model = models.build(name)
    outputs = model(torch.randn(2, *spec.input_shape))
    assert outputs.shape == (2, spec.classes)
    loss = outputs.square().mean() if spec.classes == 1 else F.cross_entropy(outputs, torch.tensor([0, 1]))
    loss.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


def test_option_a_shortcut_keeps_every_second_pixel_and_adds_zero_channels() -> None:
    from shoal.models.resnet_cifar import BasicBlock

    x = torch.arange(2 * 4 * 4, dtype=torch.float32).reshape(1, 2, 4, 4)
    shortcut = BasicBlock(2, 4, stride=2)._shortcut(x)
    assert torch.equal(shortcut[:, 1:3], x[:, :, ::2, ::2])
    assert not shortcut[:, [0, 3]].any()


def test_resnet50_downsamples_on_the_first_1x1_of_a_stage_and_not_on_the_3x3() -> None:
    from shoal.models.resnet50 import Bottleneck

    strides = [block.conv1.stride[0] for block in models.build("resnet50_cifar") if isinstance(block, Bottleneck)]
    others = [block.conv2.stride[0] for block in models.build("resnet50_cifar") if isinstance(block, Bottleneck)]
    assert [index for index, stride in enumerate(strides) if stride == 2] == [3, 7, 13]
    assert set(others) == {1}


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(SettingsContradict, match="resnet20"):
        models.spec("resnet21")
