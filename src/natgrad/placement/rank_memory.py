"""All that a rank keeps in a training step, and the largest batch that leaves room for it."""

from dataclasses import asdict, dataclass

from natgrad.errors import SettingError
from natgrad.placement.amounts import Memory
from natgrad.placement.training_step import StepModel
from natgrad.tables import bytes_text


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the rank on which K-FAC takes most.

    Arguments:
        weights: of the model, or of a rank's shard of it.
        gradients: likewise.
        optimizer: what the optimizer keeps for them.
        activations: of the whole local batch.
        buffers: what DDP or FSDP sends from and receives into: buckets, or units that are gathered.
        kfac: what K-FAC takes, by kind.
        overlaps: whether buckets of statistics leave during the backward pass.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    kfac: Memory
    overlaps: bool = False

    @property
    def fixed(self) -> float:
        """What is there all the time."""
        own = self.weights + self.gradients + self.optimizer + self.buffers
        return own + self.kfac.kept

    @property
    def backward(self) -> float:
        """Of K-FAC, beside the activations of a backward pass."""
        return self.kfac.sums + (self.kfac.update if self.overlaps else 0)

    @property
    def total(self) -> float:
        """At the busiest moment: in a backward pass that updates, or after it, when activations are
        gone."""
        return self.fixed + max(self.activations + self.backward, self.kfac.passing)

    def kinds(self) -> dict[str, float]:
        """Bytes by kind."""
        own = ("weights", "gradients", "optimizer", "activations", "buffers")
        return {name: getattr(self, name) for name in own} | asdict(self.kfac)


def rank_memory(model: StepModel) -> RankMemory:
    """What a rank keeps, and takes at the busiest moments of a step that updates and refreshes.

    Arguments:
        model: a plan, a workload and a cluster.
    """
    plan, workload = model.plan, model.workload
    shards = plan.world_size if plan.world.sharded else 1
    held = -(-workload.parameters // shards)
    others = max(0, workload.parameters - sum(block.numel for block in plan.blocks))
    return RankMemory(
        weights=held * workload.parameter_bytes,
        gradients=held * workload.parameter_bytes,
        optimizer=held * workload.optimizer_bytes,
        activations=workload.activations * workload.batch,
        buffers=_buffers(model),
        kfac=plan.fullest(others),
        overlaps=not plan.world.gradients_are_local and plan.world_size > 1,
    )


def largest_batch(model: StepModel) -> int:
    """Samples that fit into a rank beside all else.

    Arguments:
        model: a plan, a workload and a cluster that says its capacity; one that does not, and one
            into which not even one sample fits, raise.
    """
    capacity = model.cluster.capacity
    if capacity is None:
        raise SettingError(
            "Cluster.capacity is None but the largest batch depends on it: pass the bytes of a "
            "rank's memory."
        )
    memory = rank_memory(model)
    if model.workload.activations <= 0:
        raise SettingError(
            f"Workload.activations is {model.workload.activations!r} but a batch is limited by "
            "them alone: pass the bytes of one sample."
        )
    each = model.workload.activations
    fits = int((capacity - memory.fixed - memory.backward) // each)
    if fits < 1 or memory.fixed + memory.kfac.passing > capacity:
        least = memory.fixed + max(memory.backward + each, memory.kfac.passing)
        raise SettingError(
            f"A rank has {bytes_text(capacity)} but needs {bytes_text(least)} for one sample, "
            f"{bytes_text(least - capacity)} more: use more ranks, a placement that keeps less, or "
            "layout fsdp."
        )
    return fits


def _buffers(model: StepModel) -> float:
    plan, workload = model.plan, model.workload
    if plan.world_size == 1 or plan.world.gradients_are_local:
        return 0.0
    if plan.world.sharded:
        # Weights of a unit and of the next one, and the gradients of one.
        return 3.0 * max(size for _, size in model.units)
    return float(workload.parameters * workload.parameter_bytes)
