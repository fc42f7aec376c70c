"""What is left of a log after a power failure does not stop the run that goes on."""

import json

import pytest

from natgrad.lab.train.logs import Log, read

GOOD = b'{"kind": "train", "step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize(
    "wrong",
    [
        b'{"kind": "tra',
        b'{"kind": "train", "step": "1"}\n',
        b'{"kind": "train", "step": null}\n',
        b'{"kind": "train", "step": true}\n',
        b'{"step": 1}\n',
        b'\xff\xfe{"kind": "train", "step": 1}\n',
        b"\0" * 100,
        b"[1, 2]\n",
        b"9" * 5000 + b"\n",
    ],
)
def test_lines_that_are_none_are_left_out(tmp_path, wrong):
    (tmp_path / "log.jsonl").write_bytes(GOOD + wrong)
    assert read(tmp_path) == [json.loads(GOOD)]
    log = Log(tmp_path, 10)
    log("train", 2, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
