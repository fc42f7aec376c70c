"""Data sets by rows, whole and in part."""

import pytest
import torch
from torch.utils.data import DataLoader

from natgrad.errors import SettingError
from natgrad.lab.data import Rows, loader
from unit.lab.data.error_text import says


class Squares(Rows):
    chances = 1

    def __len__(self):
        return 6

    def take(self, rows, chances):
        return torch.as_tensor(rows), torch.as_tensor(rows) ** 2 + torch.from_numpy(chances[:, 0])


def test_a_part_has_its_own_rows():
    part = Squares().part([4, 1, 3])
    ((x, y),) = loader(part, 3, shuffle=False)
    assert x.tolist() == [4, 1, 3]
    assert y.floor().tolist() == [16, 1, 9]
    assert len(part) == 3
    assert part.part(range(1, 3)).take([1], part[0][1].reshape(1, 1).numpy())[0].tolist() == [3]


def test_a_row_by_its_number():
    data = Squares()
    assert [int(x) for x, _ in data] == [0, 1, 2, 3, 4, 5]
    assert int(data[-1][0]) == 5
    with pytest.raises(IndexError, match="row 6 of 6"):
        data[6]


def test_torch_loads_it_with_its_own_random_numbers():
    torch.manual_seed(1)
    x, y = next(iter(DataLoader(Squares(), batch_size=6)))
    assert x.tolist() == [0, 1, 2, 3, 4, 5]
    drawn = y - x**2
    assert len(set(drawn.tolist())) == 6
    torch.manual_seed(1)
    assert torch.equal(next(iter(DataLoader(Squares(), batch_size=6)))[1], y)


def test_messages():
    says(
        SettingError,
        "A part has row 6 but the whole has 6 of them: give rows from 0 to 5.",
        lambda: Squares().part([0, 6]),
    )
