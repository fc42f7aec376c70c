"""The update clock: from the sums of a step's backward passes to running averages.

The sums of all ranks come together where a factor is kept (`Reducer`), become estimates of the
step, and are folded into running averages if they are finite, on all ranks or on none: ranks that
keep different averages of one factor would train different models. What went wrong without being an
error (a layer that has gradients and gave no statistics) is returned as sentences for the user; a
step without any statistics is an error, as preconditioning with nothing would go unnoticed.
"""

import torch
from torch import Tensor

from natgrad.capture.averages import NewEstimate
from natgrad.capture.blocks import Block
from natgrad.capture.hooks import Capture
from natgrad.capture.statistics import Statistics
from natgrad.comm.layouts import local
from natgrad.curvature.fisher import Fisher
from natgrad.errors import CaptureError
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.ranks.gradients import missing_somewhere
from natgrad.kfac.ranks.reduction import Reducer, StepTotals
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.step import Step


class Update:
    """Called at every step that updates factors."""

    def __init__(
        self,
        team: Team,
        reducer: Reducer,
        capture: Capture,
        statistics: Statistics,
        curvature: Fisher,
        clocks: Clocks,
        finding: LossFinding,
    ) -> None:
        self.team, self.reducer, self.capture = team, reducer, capture
        self.statistics, self.curvature, self.clocks = statistics, curvature, clocks
        self.finding = finding

    def __call__(self, step: Step) -> list[str]:
        """Now that the number of samples is known. Returns warnings, a sentence each."""
        for this in self.capture.passes:
            self.statistics.flush(this)
        totals, new_sums = self.reducer.finish(step)
        if not totals.samples and totals.passes:  # an empty batch says nothing of the curvature
            return []
        blocks = list(self.team.blocks.values())
        for block in blocks:  # ranks that precondition by themselves would not notice
            if 0 < (count := totals.gradients.get(block.name, 0)) < self.team.size:
                raise missing_somewhere(block, count, self.team)
        if not totals.samples or not any(totals.counts.values()):
            if self.clocks.due(step.index):  # not for blocks alone that have just been made
                self._complain_of_silence(step.index, blocks, totals)
            return []
        found = self.finding.settle(totals.votes, step.samples or 0, step.loss_scale)
        estimates = [block.estimate(new_sums[block]) for block in blocks]
        for block, estimate, fits in zip(
            blocks, estimates, self._fit(blocks, estimates), strict=True
        ):
            block.fold(estimate, fits, step.values.factor_decay)
        self.clocks.mark(step.index, self.clocks.due(step.index))
        problems = [
            _silence(block)
            for block, names in step.due.items()
            if names and totals.none_of(block, names) and not block.refused and _has_moved(block)
        ]
        problems += found
        if not totals.even and not self.team.plan.world.gradients_are_local:
            problems.append(_UNEVEN)
        return problems

    def _fit(self, blocks: list[Block], estimates: list[NewEstimate | None]) -> Tensor:
        """Whether each block's estimates are numbers, of all uses of its parameters, wherever its
        factors are kept: no rank may fold what another one drops."""
        device, account = self.team.device, self.capture.account
        short = account.settle() if account.entries or account.stacks else {}
        none = torch.zeros((), dtype=torch.bool, device=device)
        bad = [none if estimate is None else ~estimate.finite.to(device) for estimate in estimates]
        bad = [
            one | short.get(block, none).to(device) for block, one in zip(blocks, bad, strict=True)
        ]
        found = torch.stack(bad).to(torch.float32)
        return (found if self.team.alone else self.team.total(found)) == 0

    def _complain_of_silence(self, step: int, blocks: list[Block], totals: StepTotals) -> None:
        everywhere = totals.gradients.values()  # all ranks must complain, or none
        mine = (block for block in blocks if not block.lost)
        here = (p.grad is not None for block in mine for p in block.parameters)
        if not any(here if self.team.alone else everywhere):
            return
        if self.curvature.of_residuals:
            why = f"{self.curvature!r} saw no residuals: call kfac.residuals(...) before backward()"
        elif self.curvature.observes:
            why = f"{self.curvature!r} saw no output: call kfac.observe(output) before backward()"
        elif self.capture.skipped:
            why = "the backward pass ran with create_graph=True: take that away on this step"
        else:
            why = (
                "no layer that KFAC watches was called: call the model that KFAC was given, and do "
                "not compile a function around it"
            )
        raise CaptureError(f"There are gradients at step {step} but no statistics, as {why}.")


def _has_moved(block: Block) -> bool:
    """Whether there is a gradient for this block that is not 0, and that it preconditions."""
    return not block.lost and any(
        p.grad is not None and bool(local(p.grad).any()) for p in block.parameters
    )


def _silence(block: Block) -> str:
    return (
        f"{block.kind} {block.name!r} has a gradient but gave no statistics, so its curvature is "
        "not updated. Call the module itself, not a function of its weight, and compile modules, "
        "not functions that call them."
    )


_UNEVEN = (
    "The ranks saw batches of different sizes. Curvature counts every sample once, but DDP and "
    "FSDP count every rank once: give all ranks equally many samples, or weight their losses."
)
