"""What numbers are on the wire: words of their own dtype, or three of 21 bits in a word of 64.

    float21    sign 1 | exponent 8 | mantissa 12    a float32 without its last 11 bits
    word       0 | third 21 | second 21 | first 21

21 bits are what a third of a word has (Ueno et al. 2020): the range of float32, a relative error of
at most 2^-13, and two thirds of its bytes. Nothing adds such words up, so whoever receives them
unpacks them to float32 first.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

# What sums of numbers are made in, and for `Communicator.total` also sent in.
SUMMED_AS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int64,
}

_BITS, _DROPPED = 21, 11
_MASK = (1 << _BITS) - 1
_NAN = 0x7FC00000 >> _DROPPED
_CACHED = 1 << 17


class Wire(ABC):
    """How numbers become words and words become numbers. Both go along the last axis."""

    per_word: ClassVar[int] = 1  # numbers in a word

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """That of words."""

    @property
    @abstractmethod
    def held_as(self) -> torch.dtype:
        """That of numbers before they are words, and after."""

    @property
    def summed_as(self) -> torch.dtype:
        """That in which numbers are added up."""
        return SUMMED_AS.get(self.held_as, self.held_as)

    def words(self, numbers: int) -> int:
        """How many words some numbers take, of which the last may have room left.

        Arguments:
            numbers: how many there are.
        """
        return -(-numbers // self.per_word)

    @abstractmethod
    def encode(self, numbers: Tensor) -> Tensor:
        """``[..., n]`` -> ``[..., words(n)]``, rounded to nearest, halves to even.

        Arguments:
            numbers: of any real dtype.
        """

    @abstractmethod
    def decode(self, words: Tensor, numbers: int) -> Tensor:
        """``[..., words(n)]`` -> ``[..., n]``, exactly.

        Arguments:
            words: as `encode` gives them.
            numbers: how many there were.
        """

    @abstractmethod
    def rounded(self, numbers: Tensor) -> Tensor:
        """The numbers as those get them to whom they are sent, in their own dtype.

        Arguments:
            numbers: of any shape and real dtype.
        """


@dataclass(frozen=True)
class Plain(Wire):
    """Every number is a word.

    Arguments:
        number: the dtype.
    """

    number: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return self.number

    @property
    def held_as(self) -> torch.dtype:
        return self.number

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.number)

    def decode(self, words: Tensor, numbers: int) -> Tensor:
        return words

    def rounded(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.number).to(numbers.dtype)

    def __repr__(self) -> str:
        return repr(self.number)


@dataclass(frozen=True, repr=False)
class Float21(Wire):
    """Three numbers in a word; pass ``natgrad.comm.float21``, the only object of this class."""

    per_word: ClassVar[int] = 3

    @property
    def dtype(self) -> torch.dtype:
        return torch.int64

    @property
    def held_as(self) -> torch.dtype:
        return torch.float32

    def encode(self, numbers: Tensor) -> Tensor:
        size, device = self.words(numbers.shape[-1]), numbers.device
        words = torch.empty(*numbers.shape[:-1], size, dtype=self.dtype, device=device)
        # On a CPU the temporaries of a piece stay in the cache, which is twice as fast.
        piece = _CACHED if device.type == "cpu" else max(1, size)
        for start in range(0, size, piece):
            some = numbers[..., 3 * start : 3 * (start + piece)]
            words[..., start : start + piece] = _packed(some)
        return words

    def decode(self, words: Tensor, numbers: int) -> Tensor:
        bits = torch.empty(*words.shape, 3, dtype=torch.int32, device=words.device)
        for place in range(3):
            # The lower 32 bits of what is left of a word, of which all but 21 are shifted out.
            bits[..., place] = words >> place * _BITS
        bits <<= _DROPPED
        found: Tensor = bits.view(torch.float32).flatten(-2)[..., :numbers]
        return found

    def rounded(self, numbers: Tensor) -> Tensor:
        bits = _shortened(numbers).bitwise_left_shift_(_DROPPED)
        return bits.view(torch.float32).to(numbers.dtype)

    def __repr__(self) -> str:
        return "natgrad.comm.float21"


def _shortened(numbers: Tensor) -> Tensor:
    """The upper 21 bits of float32 numbers, rounded, as int32.

    Adding half a unit carries into the exponent where it must, also from subnormal to normal
    numbers and from the largest one to infinity. Only of NaN it would make something else."""
    single = numbers.float()
    bits = single.view(torch.int32)
    half = (1 << _DROPPED - 1) - 1
    odd = (bits >> _DROPPED).bitwise_and_(1)
    short = odd.add_(bits).add_(half).bitwise_right_shift_(_DROPPED).bitwise_and_(_MASK)
    return short.masked_fill_(single.isnan(), _NAN)


def _packed(numbers: Tensor) -> Tensor:
    """``[..., n]`` -> ``[..., ceil(n / 3)]``."""
    n = numbers.shape[-1]
    short = F.pad(_shortened(numbers), (0, -n % 3)).unflatten(-1, (-(-n // 3), 3))
    words: Tensor = short[..., 2].long()
    for place in (1, 0):
        words.bitwise_left_shift_(_BITS).bitwise_or_(short[..., place])
    return words


float21 = Float21()
WireFormat = torch.dtype | Float21


def wire_of(given: WireFormat) -> Wire:
    """How numbers travel in a format that a user has given.

    Arguments:
        given: a dtype, or ``float21``.
    """
    return given if isinstance(given, Wire) else Plain(given)
