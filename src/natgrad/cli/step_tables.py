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


def recommendation(compared: PlacementComparison) -> str:
    """One sentence: which placement, at what price, and how much room is left."""
    best, room = compared.recommended(), compared.cluster.capacity
    if best is None:
        exact = (one for one in compared.trained if one.name != "Local()")
        least = min(exact, key=lambda one: one.memory.total)
        of_rank = "" if room is None else f" of {bytes_text(room)}"
        world, workload = compared.world, least.model.workload
        ways = ["more ranks" if world.sharded else "--layout fsdp"]
        ways.append("a smaller --batch" if workload.batch > 1 else "a smaller --sample")
        return (
            f"Nothing fits: the least is {bytes_text(least.memory.total)}{of_rank} on a rank, by "
            f"{least.name}, so use {' or '.join(ways)}."
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
