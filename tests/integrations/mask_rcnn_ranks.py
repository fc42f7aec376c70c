"""Trains a small Mask R-CNN as the arguments say, to be run by torchrun: rank 0 prints whether all
ranks have the same weights, the same metrics, and a share of all images."""

import hashlib
import json
import sys
from pathlib import Path

from natgrad.comm.torchrun import joined
from natgrad.lab.train import Settings, toml
from natgrad.lab.train.training import Training


def main(file: str) -> None:
    settings = Settings(**toml.read(Path(file)))
    with joined() as (comm, device):
        training = Training(settings, comm, device)
        for step, batches in training.batches(0):
            training.step(step, batches)
        metrics = training.evaluate(training.task.test)
        digest = hashlib.sha256()
        for value in training.network.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
        everyone = comm.gather((digest.hexdigest(), metrics, training.kfac.drift().change))
    if comm.rank == 0:
        weights, found, factors = zip(*everyone, strict=True)
        said = {"weights": weights, "metrics": found, "factors": [len(each) for each in factors]}
        print(f"ranks {json.dumps(said)}")


if __name__ == "__main__":
    main(sys.argv[1])
