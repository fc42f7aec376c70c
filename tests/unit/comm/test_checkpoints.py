"""What was read from a checkpoint comes into a state: tensors in place, all else as it is."""

import torch

from natgrad.comm.checkpoints import _beside, _take


def test_a_state_is_overwritten_in_place():
    kept = {"a": torch.zeros(2), "b": [torch.zeros(1), 3], "c": {"d": torch.zeros(3)}, "e": None}
    tensors = kept["a"], kept["b"][0], kept["c"]["d"]
    beside = _beside(kept)
    assert beside["b"][1] == 3
    assert beside["e"] is None
    new = [beside["a"], beside["b"][0], beside["c"]["d"]]
    for number, (one, other) in enumerate(zip(new, tensors, strict=True), 1):
        assert one.shape == other.shape
        assert one.data_ptr() != other.data_ptr()
        one.fill_(float(number))
    beside["b"][1] = 4
    beside["e"] = torch.ones(1)  # a tensor where there was none, and none where one was
    _take(kept, beside)
    assert [t.tolist() for t in tensors] == [[1.0, 1.0], [2.0], [3.0, 3.0, 3.0]]
    assert kept["a"] is tensors[0]
    assert kept["b"][0] is tensors[1]
    assert kept["b"][1] == 4
    assert kept["e"] is beside["e"]
    _take(kept, {**beside, "a": None, "c": {"d": tensors[2], "f": 5}})
    assert kept["a"] is None
    assert kept["c"] == {"d": tensors[2], "f": 5}  # of another size: as it was read
