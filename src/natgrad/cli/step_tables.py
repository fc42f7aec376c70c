"""What a training step is made of, as a table and as one sentence."""

from natgrad.cli.placements import PlacementComparison, Trained
from natgrad.errors import SettingError
from natgrad.placement import Kind, largest_batch
from natgrad.tables import Column, Table, bytes_text, seconds_text

STAGES = {
    "forward": "forward",
    "weights": "weights (all-gathers)",
    "backward": "backward, statistics",
    "gradients": "gradients (all-reduce)",
    "factors": "factors (sums)",
    "fold": "running averages of factors",
    "decompose": "decompositions",
    "share": "inverses (broadcast)",
    "gather": "gradients to workers",
    "precondition": "precondition",
    "give back": "results (broadcast)",
}


def stage_table(trained: Trained) -> Table:
    """Seconds of every stage in the four kinds of step."""
    steps = [trained.model.step(kind) for kind in Kind]
    stages = [step.stages() for step in steps]
    rows = [
        (text, *(seconds_text(of[name]) if name in of else "–" for of in stages))
        for name, text in STAGES.items()
        if any(name in of for of in stages)
    ]
    rows.append(("waits for the link", *(seconds_text(step.exposed) for step in steps)))
    rows.append(("step", *(seconds_text(step.seconds) for step in steps)))
    world = trained.model.plan.world
    average, longest = trained.model.staggered(world.update_every, world.refresh_every)
    columns = (Column("stage"), *(Column(kind.value, "right") for kind in Kind))
    footer = (
        f"of {trained.name}, {seconds_text(trained.seconds)} on average; with layers refreshed one "
        f"after the other {seconds_text(average)}, and the longest step {seconds_text(longest)}"
    )
    return Table("Stages of a training step", columns, tuple(rows), footer)


KINDS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "buckets of DDP, units of FSDP",
    "factors": "running averages of factors",
    "inverses": "decompositions",
    "prepared": "prepared of them for the damping",
    "stacks": "stacks of gradients, their products",
    "activations": "backward: activations",
    "sums": "backward, update: statistics",
    "update": "update: buckets sent and received",
    "workspace": "refresh: workspace of a decomposition",
    "refresh": "refresh: buckets sent and received",
    "apply": "every step: gradients on their way",
}


def memory_table(trained: Trained) -> Table:
    """Bytes of the rank on which K-FAC takes most, by kind."""
    sizes = trained.memory.kinds()
    rows = tuple((text, bytes_text(sizes[name])) for name, text in KINDS.items() if sizes[name])
    columns = (Column("kind"), Column("bytes", "right"))
    most = bytes_text(trained.memory.total)
    footer = (
        f"of {trained.name}, on the rank where K-FAC takes most; {most} at the busiest moment, as "
        "what a backward pass, an update, a refresh and a step take is gone before the next"
    )
    return Table("Memory of a rank", columns, rows, footer)


def _smaller(least: Trained) -> str:
    """A batch that fits, if there is one."""
    try:
        return f"--batch {largest_batch(least.model)}"
    except SettingError:
        return "a smaller --batch" if least.model.workload.batch > 1 else "a smaller --sample"


def recommendation(compared: PlacementComparison) -> str:
    """One sentence: which placement, at what price, and how much room is left."""
    best, room = compared.recommended(), compared.cluster.capacity
    if best is None:
        exact = (one for one in compared.trained if one.name != "Local()")
        least = min(exact, key=lambda one: one.memory.total)
        of_rank = ""
        if room is not None and least.memory.total > room:
            over = bytes_text(least.memory.total - room)
            of_rank = f", {over} more than the {bytes_text(room)} it has"
        ways = ["more ranks" if compared.world.sharded else "--layout fsdp", _smaller(least)]
        return (
            f"Nothing fits: the least is {bytes_text(least.memory.total)} on a rank, by "
            f"{least.name}{of_rank}, so use {' or '.join(ways)}."
        )
    plain = best.model.step(Kind.WITHOUT).seconds
    said = (
        f"Recommended: {best.name}, whose average training step takes {seconds_text(best.seconds)}"
        f", {best.seconds / plain:.2f} times one without K-FAC, and a rank "
        f"{bytes_text(best.memory.total)}"
    )
    if room is None:
        return f"{said}."
    try:
        most = largest_batch(best.model)
    except SettingError:
        return f"{said} of {bytes_text(room)}."
    return f"{said} of {bytes_text(room)}, which has room for {most} samples."
