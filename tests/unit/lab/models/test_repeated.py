"""Equal layers in a row are counted from a few of them, to the last operation, byte and arrival."""

import pytest
import torch
from torch import nn

from natgrad.lab.models import repeated
from natgrad.lab.models.gpt import GPT
from natgrad.lab.models.llama import Llama, LlamaSize
from natgrad.lab.models.workload import passes

SAMPLE = (16,)


class Dense(nn.Module):
    """A chain; or every layer sees what all before it gave, one below the other."""

    def __init__(self, layers, grows):
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.grows = grows

    def forward(self, x):
        found = [self.first(x)]
        for layer in self.layers:
            seen = torch.cat(found) if self.grows else found[-1]
            found.append(layer(seen).relu()[: len(x)])
        return found[-1]


class Indexed(Dense):
    """Knows how many layers it has."""

    def forward(self, x):
        x = self.first(x)
        for index in range(12):
            x = self.layers[index](x)
        return x


def llama():
    return Llama(LlamaSize(12, 16, 4, 2, 24), 32)


MODELS = {
    "llama": llama,
    "gpt": lambda: GPT(32, 16, layers=12, heads=2, width=8),
    "chain": lambda: Dense(12, grows=False),
    "dense": lambda: Dense(12, grows=True),
    "indexed": lambda: Indexed(12, grows=False),
    "tied": lambda: nn.Sequential(*[nn.Linear(16, 16)] * 12),
    "different": lambda: nn.Sequential(*(nn.Linear(16, 16, bias=i != 3) for i in range(12))),
    "few": lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(9))),
}


def figures(found):
    order = {}
    calls = [
        (id(c.module), c.positions, order.setdefault(c.source, len(order))) for c in found.calls
    ]
    arrivals = [(id(p), share) for p, share in found.arrivals]
    return found.forward, found.backward, found.activations, calls, arrivals


@pytest.mark.parametrize("name", MODELS)
def test_what_is_counted_on_few_layers_is_what_all_of_them_have(name, monkeypatch):
    with torch.device("meta"):
        model = MODELS[name]()
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    entered = []
    for layer in model.modules():
        if type(layer).__name__ in ("LlamaLayer", "Linear"):
            layer.register_forward_pre_hook(lambda module, _: entered.append(id(module)))
    fast = figures(passes(model, SAMPLE))
    visited = len({*entered})
    monkeypatch.setattr(repeated, "_repeated", lambda model: None)
    assert figures(passes(model, SAMPLE)) == fast
    everything = len({*entered})
    assert (visited < everything) == (name in ("llama", "gpt", "chain"))
    # Nothing is cut any longer.
    assert [name for name, _ in model.named_modules(remove_duplicate=False)] == names


def test_an_error_is_that_of_the_whole_model():
    class Odd(Dense):
        def forward(self, x):
            raise ValueError(f"{len(self.layers)} layers")

    with torch.device("meta"):
        model = Odd(12, grows=False)
    with pytest.raises(Exception, match="12 layers"):
        passes(model, SAMPLE)
