"""Weights from files, of any version of torch, with words for who asks."""

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.models import weights


@pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])
def test_forms_of_files(new, tmp_path):
    """Both are read, and the file may go afterwards."""
    file, model, other = tmp_path / "a.pt", nn.Linear(300, 20), nn.Linear(300, 20)
    torch.save({"model": other.state_dict()}, file, _use_new_zipfile_serialization=new)
    weights.load_into(model, file, "start_from")
    file.write_bytes(b"")
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_words(tmp_path):
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "a.pt")
    with pytest.raises(SettingError) as error:
        weights.load_into(nn.Linear(2, 4), tmp_path / "a.pt", "start_from", "name another")
    assert str(error.value) == (
        f"start_from {tmp_path / 'a.pt'} has 'weight' of shape [3, 2] but the model's has [4, 2]: "
        "name another."
    )
