"""Residual networks have the published sizes, and blocks compute what they say."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.errors import SettingError
from natgrad.lab.models import Residual, resnet, small_resnet


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (18, 11_689_512),
        (34, 21_797_672),
        (50, 25_557_032),
        (101, 44_549_160),
        (152, 60_192_808),
    ],
)
def test_large_ones_have_the_published_sizes(depth, expected):
    with torch.device("meta"):
        model = resnet(depth)
    assert size(model) == expected
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def convolutions(model):
    return [m for m in model.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]


@pytest.mark.parametrize("depth", [20, 32, 56, 110])
def test_small_ones_have_the_sizes_of_their_layers(depth):
    n = (depth - 2) // 6

    def block(inputs, width):
        return 9 * width * (inputs + width) + 4 * width

    stages = [(16, 16), (16, 32), (32, 64)]
    blocks = sum(block(i, w) + (n - 1) * block(w, w) for i, w in stages)
    model = small_resnet(depth)
    assert size(model) == 27 * 16 + 2 * 16 + blocks + 65 * 10
    assert len(convolutions(model)) == depth


@pytest.mark.parametrize(
    ("depth", "expected"), [(20, 269_722), (32, 464_154), (56, 853_018), (110, 1_727_962)]
)
def test_small_ones_have_the_published_sizes(depth, expected):
    assert size(small_resnet(depth)) == expected


@pytest.mark.parametrize(("depth", "expected"), [(20, 272_474), (32, 466_906)])
def test_projections_have_parameters(depth, expected):
    assert size(small_resnet(depth, project=True)) == expected


@pytest.mark.parametrize("project", [False, True])
def test_small_ones_run(project):
    model = small_resnet(8, 7, project=project)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_classes_of_large_ones():
    with torch.device("meta"):
        assert resnet(18, 10)(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 10)


def silent(block):
    """Its branch gives zeros, so that only the shortcut is left."""
    last = block.norm3 if block.bottleneck else block.norm2
    torch.nn.init.zeros_(last.weight)
    return block


def test_a_shortcut_without_parameters_takes_every_second_pixel_and_adds_zeros():
    x = torch.randn(2, 3, 6, 6)
    y = silent(Residual(3, 5, 2, project=False))(x)
    torch.testing.assert_close(y[:, 1:4], F.relu(x[:, :, ::2, ::2]))
    assert y.shape == (2, 5, 3, 3)
    assert not y[:, [0, 4]].any()


@pytest.mark.parametrize("project", [False, True])
def test_a_shortcut_of_the_same_shape_is_the_identity(project):
    x = torch.randn(2, 8, 6, 6)
    y = silent(Residual(8, 2, 1, bottleneck=True, project=project))(x)
    torch.testing.assert_close(y, F.relu(x))


@pytest.mark.parametrize("bottleneck", [False, True])
def test_a_block_is_the_sum_of_branch_and_projection(bottleneck):
    torch.manual_seed(0)
    block = Residual(3, 4, 2, bottleneck=bottleneck).eval()  # norms of untrained layers: identities
    x = torch.randn(2, 3, 6, 6)

    def conv(layer, y, stride=1):
        padding = layer.kernel_size[0] // 2
        return F.conv2d(y, layer.weight, stride=stride, padding=padding)

    if bottleneck:
        y = F.relu(conv(block.conv2, F.relu(conv(block.conv1, x)), 2))
        branch = conv(block.conv3, y)
    else:
        branch = conv(block.conv2, F.relu(conv(block.conv1, x, 2)))
    expected = F.relu(branch + conv(block.shortcut[0], x, 2))
    torch.testing.assert_close(block(x), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: resnet(51),
            "There is no ResNet of depth 51 for images of 224 x 224: pass one of 18, 34, 50, 101, "
            "152, or use small_resnet().",
        ),
        (
            lambda: small_resnet(30),
            "A ResNet for images of 32 x 32 has 6n + 2 layers and not 30: pass a depth such as 20, "
            "32, 56 or 110.",
        ),
        (
            lambda: small_resnet(2),
            "A ResNet for images of 32 x 32 has 6n + 2 layers and not 2: pass a depth such as 20, "
            "32, 56 or 110.",
        ),
    ],
)
def test_depths_are_checked(build, message):
    with pytest.raises(SettingError) as error:
        build()
    assert str(error.value) == message
