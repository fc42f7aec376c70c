"""Batches: one, or a loader of them, of ``(inputs, targets)`` or of mappings with ``labels``."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from natgrad.capture.passes import leading_size, tensors_of
from natgrad.errors import SettingError

LABELS = "labels"  # as Hugging Face calls the targets


@dataclass(frozen=True)
class Batch:
    """One batch of samples.

    Arguments:
        inputs: what the model is called with: one argument, a tuple or list of positional
            arguments, or a mapping of keyword arguments.
        targets: what the loss gets as its second argument.
        samples: ``n``, the length of the first axis of the inputs.
    """

    inputs: Any
    targets: Any
    samples: int

    def call(self, model: nn.Module) -> Tensor:
        """The model's output; of several the ``logits``, or the first.

        Arguments:
            model: is called with ``inputs``; must return a tensor, a tuple that starts with one, or
                something with ``logits``.
        """
        if isinstance(self.inputs, Mapping):
            found = model(**self.inputs)
        elif isinstance(self.inputs, tuple | list):
            found = model(*self.inputs)
        else:
            found = model(self.inputs)
        if isinstance(found, Tensor):
            return found
        logits = found.get("logits") if isinstance(found, Mapping) else None
        if logits is None:
            logits = getattr(found, "logits", None)
        if logits is None and isinstance(found, tuple | list) and found:
            logits = found[0]
        if not isinstance(logits, Tensor):
            raise SettingError(
                f"The model returned an object of type {type(found).__name__} but must return a "
                "tensor, a tuple that starts with one, or something with .logits: wrap it in a "
                "module that does."
            )
        return logits


def read(item: Any) -> Batch:
    """One batch as loaders give it.

    Arguments:
        item: a pair ``(inputs, targets)``, or a mapping with the key ``labels``; an empty batch
            raises.
    """
    if isinstance(item, Mapping):
        if LABELS not in item:
            raise SettingError(
                f"A batch is a mapping with the keys {sorted(map(str, item))} but needs {LABELS!r} "
                "for the targets: rename that key, or give pairs (inputs, targets)."
            )
        inputs: Any = {key: value for key, value in item.items() if key != LABELS}
        targets = item[LABELS]
    elif isinstance(item, tuple | list) and len(item) == 2:
        inputs, targets = item
    else:
        raise SettingError(
            f"A batch is an object of type {type(item).__name__} but must be a pair (inputs, "
            f"targets) or a mapping with {LABELS!r}: give such batches."
        )
    values = tuple(inputs.values()) if isinstance(inputs, Mapping) else (inputs,)
    samples = leading_size(tuple(t for v in values for t in tensors_of(v)), 0)
    if not samples:
        raise SettingError(
            "A batch has no samples: the first axis of its inputs is empty, or there is no tensor "
            "in it; leave empty batches out."
        )
    return Batch(inputs, targets, samples)


class Data:
    """Iterates over batches, as often as asked for.

    Arguments:
        source: one batch (a mapping, or a pair whose second entry is a tensor), or an iterable of
            batches. An iterator is refused, since it can be read only once.
    """

    def __init__(self, source: Any) -> None:
        single = isinstance(source, Mapping) or (
            isinstance(source, tuple | list) and len(source) == 2 and isinstance(source[1], Tensor)
        )
        self.source: Iterable[Any] = (source,) if single else source
        self.single = single
        if not isinstance(source, Iterable):
            raise SettingError(
                f"data is an object of type {type(source).__name__} but must be a batch (inputs, "
                "targets) or a loader of batches: give one of them."
            )
        if isinstance(self.source, Iterator):
            raise SettingError(
                f"data is a {type(source).__name__}, which can be read only once, but a matrix "
                "reads its data at every product: give a list or a DataLoader."
            )

    def __len__(self) -> int:
        """Of batches; 0 if that is not known."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else 0
        except TypeError:  # a DataLoader has a length only if its data set has one
            return 0

    def __iter__(self) -> Iterator[Batch]:
        return map(read, self.source)

    def refuse_shuffled(self, why: str) -> None:
        """Raise if a ``DataLoader`` shuffles, where batches must come in the same order at every
        pass.

        Arguments:
            why: the end of the error sentence: what needs the same order.
        """
        sampler = getattr(self.source, "sampler", None)
        drawn = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        if drawn or getattr(sampler, "shuffle", False):
            raise SettingError(
                f"The data come from a DataLoader that shuffles, so that {why}: give one with "
                "shuffle=False."
            )
