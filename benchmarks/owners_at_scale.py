"""Where ranks outnumber factors: what sharing out one factor's work gains, and what it would gain.

    python -m benchmarks.owners_at_scale --markdown      the tables of docs/planning.md

The first table is what plans do: Cholesky inverses that several ranks make together, against plans
in which each is made by one rank. The second is a bound for what they do not: every worker of a
block preconditions some rows of its gradient instead of all, which is half of the products of an
eigendecomposition and all of those with explicit inverses. It is optimistic, as what travels is
taken to stay the same; where every rank is a worker, gradients must travel that now do not.
"""

import argparse
from collections.abc import Iterator
from functools import lru_cache

from natgrad import KFAC, Cholesky, Eigen
from natgrad.inverses import Inverse
from natgrad.lab.models.planned import PLANNED
from natgrad.lab.models.spreading import Layout, spread
from natgrad.lab.names import NETWORKS
from natgrad.placement import CLUSTERS, Flops, Hybrid, MemOpt, Plan, World, assemble, simulate
from natgrad.placement.strategies.hybrid import grid, some_divisors
from natgrad.specs import BlockSpec

ON = CLUSTERS["h100x8"]
CHOSEN = {"resnet50": Layout.DDP, "bert-large": Layout.DDP, "llama-7b": Layout.FSDP}
RANKS = (64, 1024)


def spread_out(name: str, inverse: Inverse, ranks: int) -> tuple[tuple[BlockSpec, ...], World]:
    return spread(counted(name, inverse), ranks, CHOSEN[name])


@lru_cache
def counted(name: str, inverse: Inverse) -> KFAC:
    network = PLANNED[name] if name in PLANNED else NETWORKS[name]
    return KFAC(network.without_weights(), kl_clip=None, inverse=inverse)


def average(plan: Plan) -> float:
    return simulate(plan, ON).step_seconds(plan.world.update_every, plan.world.refresh_every)


def shared(name: str, ranks: int) -> tuple[Plan, Plan]:
    """The fastest plan in which every inverse is made by one rank, and the fastest of all."""
    blocks, world = spread_out(name, Cholesky(), ranks)
    alone, together = [], []
    for workers in some_divisors(ranks):
        duties = grid(blocks, world, workers, Flops())
        alone.append(assemble(f"{workers} workers", blocks, world, duties, cluster=ON))
        together.append(Hybrid(workers / ranks, cluster=ON)(blocks, world))
    return min(alone, key=average), min(together, key=average)


def rows(name: str, inverse: Inverse, ranks: int) -> tuple[float, float]:
    """Seconds of the fastest average step, and of what it could be with rows shared out."""
    blocks, world = spread_out(name, inverse, ranks)
    back = simulate(MemOpt(cluster=ON)(blocks, world), ON).stages
    assert back is not None
    now, then = [], []
    for workers in some_divisors(ranks):
        plan = Hybrid(workers / ranks, cluster=ON)(blocks, world)
        stages = simulate(plan, ON).stages
        assert stages is not None
        split = 0.5 if isinstance(inverse, Eigen) else 1.0
        saved = split * (1 - 1 / workers) * stages.precondition
        more = back.give_back if workers == ranks > 1 else 0.0
        now.append(average(plan))
        then.append(average(plan) - saved + more)
    return min(now), min(now + then)


def markdown() -> Iterator[str]:
    yield "| Cholesky | ranks | refresh, one rank each | shared out | average step | shared out |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name in CHOSEN:
        for ranks in RANKS:
            plans = shared(name, ranks)
            refresh = [_ms(max(simulate(plan, ON).refresh)) for plan in plans]
            steps = [_ms(average(plan)) for plan in plans]
            yield f"| {name} | {ranks:,} | {' | '.join(refresh + steps)} |"
    yield ""
    yield "| preconditioning by rows | ranks | average step | at best | less |"
    yield "|---|---:|---:|---:|---:|"
    for name in CHOSEN:
        for inverse in (Eigen(), Cholesky()):
            for ranks in RANKS:
                now, then = rows(name, inverse, ranks)
                cells = f"{_ms(now)} | {_ms(then)} | {1 - then / now:.1%}"
                yield f"| {name}, {type(inverse).__name__} | {ranks:,} | {cells} |"


def _ms(seconds: float) -> str:
    """In three digits."""
    return f"{float(f'{1e3 * seconds:.3g}'):,g} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print the tables")
    if parser.parse_args().markdown:
        for line in markdown():
            print(line, flush=True)
    else:
        parser.print_help()


if __name__ == "__main__":
    main()
