"""Modules with a parameter that sits bare on them, as models of other libraries have them. All take
``x [n, 4, 6]`` and give ``[n, 3]``; ``p`` is the parameter, or ``p`` and ``q``."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS, WIDTH = 4, 6


class Bare(nn.Module):
    """``sizes`` of ``p`` and, if there are two, of ``q``; ``inside(x)`` uses them, between two
    linear layers."""

    sizes: tuple[tuple[int, ...], ...] = ((WIDTH,),)

    def __init__(self):
        super().__init__()
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        for name, size in zip("pq", self.sizes, strict=False):
            setattr(self, name, nn.Parameter(torch.rand(size) + 0.5))

    def forward(self, x):
        return self.head(self.inside(self.before(x)).tanh().mean(1))

    def inside(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Scaled(Bare):
    """A layer scale in a residual branch, as ConvNeXt's and CaiT's."""

    def inside(self, x):
        return x + self.p * x.sin()


class Shifted(Bare):
    """Positions, of which the first are taken."""

    sizes = ((1, TOKENS + 3, WIDTH),)

    def inside(self, x):
        return x + self.p[:, : x.shape[1]]


class InPlace(Bare):
    sizes = ((TOKENS, WIDTH),)

    def inside(self, x):
        x = x.sin()
        x += self.p
        return x


class ClassToken(Bare):
    """With positions, as ViT's."""

    sizes = ((1, 1, WIDTH), (1, TOKENS + 1, WIDTH))

    def inside(self, x):
        return torch.cat((self.p.expand(x.shape[0], -1, -1), x), dim=1) + self.q


class RepeatedToken(ClassToken):
    """As older ones, with a prefix that is joined first, as DeiT's."""

    def inside(self, x):
        both = torch.cat((self.p, 2 * self.p), 1).repeat(len(x), 1, 1)
        return torch.cat([both, x], 1)[:, :5] + self.q.to(x.dtype)


class Interpolated(Bare):
    sizes = ((1, 9, WIDTH),)

    def inside(self, x):
        table = self.p.reshape(1, 3, 3, -1).permute(0, 3, 1, 2)
        table = F.interpolate(table, size=(2, 2), mode="bicubic", align_corners=False)
        return x + table.permute(0, 2, 3, 1).view(1, -1, WIDTH)


class Decay(Bare):
    """As Mamba's ``A_log`` and ``D``."""

    sizes = ((WIDTH, 2), (WIDTH,))

    def inside(self, x):
        a = -torch.exp(self.p.to(x.dtype))
        scanned = torch.exp(a[None, None] * x.abs()[..., None]).sum(-1)
        return scanned + x * self.q[None, None, :]


class Twice(Bare):
    """One parameter at two places, once behind itself."""

    def inside(self, x):
        return (x * self.p).sin() / self.p - 0.5 * (1 - self.p)


class Masked(Bare):
    """A token in the place of hidden ones, as DINOv2's and MAE's."""

    sizes = ((1, WIDTH), (1, 1, WIDTH))

    def inside(self, x):
        hidden = x.detach().sum(-1, keepdim=True) > 0
        x = torch.where(hidden, self.p.to(x.dtype).unsqueeze(0), x)
        some = hidden.roll(1, 1).to(x.dtype)
        return x * (1 - some) + self.q.expand(len(x), x.shape[1], -1) * some


class Table(nn.Module):
    """Relative positions, looked up in a module of their own."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(2 * TOKENS - 1, 2))
        index = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None] + TOKENS - 1
        self.register_buffer("index", index.flatten())

    def forward(self):
        table = self.p[self.index].view(TOKENS, TOKENS, -1)
        return table.permute(2, 0, 1).contiguous().unsqueeze(0)


class Attention(nn.Module):
    """With a table of positions that its parent uses, as Swin's; windows of every sample behind
    each other, with a mask for half of them."""

    def __init__(self, fused, windows=1):
        super().__init__()
        self.before, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
        self.table, self.fused, self.windows = Table(), fused, windows

    def forward(self, x):
        n, length = len(x), TOKENS
        scales = torch.linspace(1, 2, self.windows, dtype=x.dtype).repeat(n)
        x = x.repeat_interleave(self.windows, 0) * scales.view(-1, 1, 1)
        q, k, v = self.before(x).view(len(x), length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        bias = self.table()
        if self.windows > 1:
            mask = torch.zeros(self.windows, length, length, dtype=x.dtype)
            mask[1:, :2] = -1.0
            mask = mask[None, :, None].expand(n, -1, -1, -1, -1)
            bias = bias + mask.reshape(-1, 1, length, length)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            out = (q @ k.mT / 3**0.5 + bias).softmax(-1) @ v
        return self.head(out.transpose(1, 2).reshape(n, -1, WIDTH).mean(1))


class FusedAttention(Attention):
    def __init__(self):
        super().__init__(True)


class PlainAttention(Attention):
    def __init__(self):
        super().__init__(False)


class Windows(Attention):
    def __init__(self):
        super().__init__(True, windows=3)


class Sinks(Bare):
    """As those of GPT-OSS: a score beside those of all keys, for each of two heads."""

    sizes = ((2,),)

    def inside(self, x):
        q = x.view(len(x), TOKENS, 2, -1).transpose(1, 2)
        sinks = self.p.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        scores = torch.cat([q @ q.mT, sinks], dim=-1).softmax(-1)[..., :-1]
        return (scores @ q).transpose(1, 2).flatten(2)


class Queries(Bare):
    """Learned ones, as those of a pooling head or a Perceiver."""

    sizes = ((1, 2, WIDTH),)

    def inside(self, x):
        q = self.p.expand(len(x), -1, -1)
        q = self.before(q).view(len(x), 2, 2, -1).transpose(1, 2)
        k = x.view(len(x), TOKENS, 2, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).reshape(len(x), 2, -1)


class Images(Bare):
    """One number a channel; images in front of it."""

    sizes = ((2, 1, 1), (2, 3, 2))

    def inside(self, x):
        x = x.view(len(x), 2, -1, 3, 2).mean(2) * self.p + self.q
        return torch.cat([x.flatten(2), x.flatten(2)], 1)


class Number(Bare):
    sizes = ((),)

    def inside(self, x):
        return (x * self.p.exp()).sin()


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(9, WIDTH))

    def forward(self, which):
        return self.p[which]


class Whisper(nn.Module):
    """Positions are asked for, for every sample."""

    def __init__(self):
        super().__init__()
        self.before, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.positions = Positions()

    def forward(self, x):
        which = x.detach().abs().sum(-1).long() % 9
        return self.head((self.before(x) + self.positions(which)).tanh().mean(1))


class Folded(Bare):
    """Positions are folded into the samples' axis."""

    def inside(self, x):
        return (x.flatten(0, 1) * self.p).view_as(x)


class OfInput(Bare):
    """The first thing that is done to the input."""

    sizes = ((TOKENS, WIDTH),)

    def forward(self, x):
        return self.head((self.before(x * self.p)).tanh().mean(1))


class Frozen(Bare):
    """Behind a layer that is not trained."""

    sizes = ((1, TOKENS, WIDTH), (1, 1, WIDTH))

    def __init__(self):
        super().__init__()
        self.before.requires_grad_(False)

    def inside(self, x):
        x = torch.cat([self.q.expand(len(x), -1, -1), x], 1)[:, 1:] + x
        return F.layer_norm(x + self.p, (WIDTH,))


UNDERSTOOD: list[type[nn.Module]] = [
    *(Scaled, Shifted, InPlace, ClassToken, RepeatedToken, Interpolated, Decay, Twice, Masked),
    *(FusedAttention, PlainAttention, Windows, Sinks, Queries, Images, Number, Folded),
    Whisper,
    *(OfInput, Frozen),
]


class Product(Bare):
    """A matrix, without a layer."""

    sizes = ((WIDTH, WIDTH),)

    def inside(self, x):
        return x @ self.p


class LookedUp(Bare):
    """Other rows for other samples."""

    sizes = ((5, WIDTH),)

    def inside(self, x):
        which = (x.detach().sum((1, 2)).abs() * 10).long() % 5
        return x + self.p[which][:, None]


class Written(Bare):
    sizes = ((WIDTH,),)

    def inside(self, x):
        x = x.clone()
        x[:, 0] = self.p
        return x


class Apart(nn.Module):
    """Whoever calls the module takes the parameter itself as well."""

    def __init__(self):
        super().__init__()
        self.inner = Scaled()

    def forward(self, x):
        return self.inner(x) + self.inner.p[:3]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * g * x


class Unseen(Bare):
    """A function that no tensor can watch."""

    def inside(self, x):
        p = Square.apply(self.p) if type(self.p) is nn.Parameter else Square.apply(plain(self.p))
        return x * p


def plain(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor) * 1


class Samples(Bare):
    """An entry for each of eight samples."""

    sizes = ((8, 1, WIDTH),)

    def inside(self, x):
        return x + self.p


REFUSED: dict[type[nn.Module], str] = {
    Product: "enters matmul()",
    LookedUp: "has entries of its own for samples",
    Written: "is written into another tensor",
    Apart: "not all of its uses are seen",
    Unseen: "not all of its uses are seen",
    Samples: "has entries of its own for samples",
}
