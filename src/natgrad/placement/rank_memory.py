"""All that a rank keeps in a training step, and the largest batch that leaves room for it."""

from dataclasses import dataclass, fields

from natgrad.errors import SettingError
from natgrad.placement.ops import Op, Reduce
from natgrad.placement.plan import Plan
from natgrad.placement.routes import Route
from natgrad.placement.training_step import Kind, StepModel
from natgrad.tables import bytes_text


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the rank that keeps most for K-FAC.

    Arguments:
        weights: of the model, or of a rank's shard of it.
        gradients: likewise.
        optimizer: what the optimizer keeps for them.
        activations: of the whole local batch.
        factors: running averages.
        inverses: decompositions.
        sums: statistics of the step that have not been sent yet.
        buffers: what collectives send from and receive into: DDP's buckets, units that FSDP has
            gathered, and the largest exchange of K-FAC.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    factors: float
    inverses: float
    sums: float
    buffers: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, one.name) for one in fields(self)))


def rank_memory(model: StepModel) -> RankMemory:
    """What a rank keeps where everything is there at once: at the end of a backward pass that
    updates.

    Arguments:
        model: a plan, a workload and a cluster.
    """
    plan, workload = model.plan, model.workload
    shards = plan.world_size if plan.world.sharded else 1
    held = -(-workload.parameters // shards)
    kept = plan.fullest
    return RankMemory(
        weights=held * workload.parameter_bytes,
        gradients=held * workload.parameter_bytes,
        optimizer=held * workload.optimizer_bytes,
        activations=workload.activations * workload.batch,
        factors=kept.factors,
        inverses=kept.inverses,
        sums=model.step(Kind.UPDATE).waiting,
        buffers=_buffers(model),
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
    fixed = memory.total - memory.activations
    if model.workload.activations <= 0:
        raise SettingError(
            f"Workload.activations is {model.workload.activations!r} but a batch is limited by "
            "them alone: pass the bytes of one sample."
        )
    fits = int((capacity - fixed) // model.workload.activations)
    if fits < 1:
        raise SettingError(
            f"A rank has {bytes_text(capacity)} but needs {bytes_text(fixed)} beside activations, "
            f"and {bytes_text(model.workload.activations)} for one sample: use more ranks, a "
            "placement that keeps less, or layout fsdp."
        )
    return fits


def _buffers(model: StepModel) -> float:
    plan, workload = model.plan, model.workload
    if plan.world_size == 1:
        return 0.0
    own = max(
        map(float, (_largest(plan, clock) for clock in (plan.update, plan.refresh, plan.apply)))
    )
    if plan.world.sharded:
        # Weights of a unit and of the next one, and the gradients of one.
        return own + 3.0 * max(size for _, size in model.units)
    if plan.world.gradients_are_local:
        return own
    return own + workload.parameters * workload.parameter_bytes


def _largest(plan: Plan, ops: tuple[Op, ...]) -> int:
    """Bytes that are sent from, and received into, in the largest exchange of a clock. A rank that
    sums directly receives as many copies as there are other ranks."""
    most = 0
    for bucket in plan.cut(ops):
        sent = sum(plan.copy_bytes(op) for op in bucket)
        received: dict[int, int] = {}
        for op in bucket:
            if isinstance(op, Reduce) and plan.routes.of(op) is Route.DIRECT:
                size = plan.copy_bytes(op) * (plan.world_size - 1)
                received[op.to[0]] = received.get(op.to[0], 0) + size
        most = max(most, sent + max([sent, *received.values()]))
    return most
