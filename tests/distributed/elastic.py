"""A training run for torchrun that saves every other step and goes on from there, whatever ended
it; ranks can be told to kill themselves, one after each start."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from distributed.resuming import Training, run
from natgrad.comm.checkpoints import CheckpointFolder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--die", nargs=3, action="append", metavar=("STAGE", "RANK", "STEP"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training.here(run(options.layout))
    progress = {"training": Everything(training), "step": 0}
    last = options.folder / "last"
    if last.exists():
        training.kfac.load(last, progress)
    victim = Victim(options, training)
    with open(options.folder / "log", "a") as log:
        print(f"rank {training.rank} from step {progress['step']}", file=log)
    while progress["step"] < options.steps:
        victim.prepare(progress["step"])
        training.steps(progress["step"], progress["step"] + 1)
        progress["step"] += 1
        if progress["step"] % 2 == 0:
            training.kfac.save(last, progress)
    torch.save(training.weights(), options.folder / f"weights{training.rank}")
    dist.barrier()  # see finish() of examples/ranks.py
    time.sleep(0.1)
    dist.destroy_process_group()


class Everything:
    """Model and optimizer."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def state_dict(self):
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Victim:
    def __init__(self, options: argparse.Namespace, training: Training) -> None:
        kfac = training.kfac
        self.stages = {
            "update": (kfac.reducer, "finish"),
            "apply": (kfac.gradients, "give_back"),
            "save": (CheckpointFolder, "replace"),
        }
        before = len(list(options.folder.glob("killed*")))
        self.mark = options.folder / f"killed{before}"
        # Where this rank dies after this start, and at which step.
        self.due = next(
            (
                (stage, int(step))
                for stage, rank, step in (options.die or [])[before : before + 1]
                if int(rank) == training.rank
            ),
            None,
        )

    def prepare(self, step: int) -> None:
        if self.due is not None and step == self.due[1]:
            owner, name = self.stages[self.due[0]]
            setattr(owner, name, self.die)

    def die(self, *_) -> None:
        self.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
