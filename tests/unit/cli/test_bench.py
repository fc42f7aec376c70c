"""`natgrad bench` shows reductions that run under the backward pass, in its trace and tables."""

import json
from collections import defaultdict
from dataclasses import replace

import pytest

from natgrad import KFAC, CommOpt
from natgrad.cli.options import network
from natgrad.lab.models.spreading import Layout, spread
from natgrad.tables import bytes_text

SHARED = "unit.cli.nets:Shared"
STEPS, BUCKET = 3, 256
COMMAND = (
    *("bench", "--network", SHARED, "--sample", "5", "--ranks", "2", "--placement", "comm"),
    *("--steps", str(STEPS), "--bucket", str(BUCKET), "--batch", "4", "--refresh-every", "3"),
)


@pytest.fixture(scope="module")
def plan():
    """What the ranks of COMMAND agree on, in buckets as small as theirs."""
    blocks, world = spread(KFAC(network(SHARED).without_weights(), kl_clip=None), 2, Layout.DDP)
    return CommOpt()(blocks, replace(world, bucket_bytes=BUCKET))


@pytest.mark.distributed
def test_reductions_run_under_the_backward_pass(natgrad, tmp_path, plan):
    file = tmp_path / "trace.json"
    said = natgrad(*COMMAND, "--trace", str(file), "--ops")
    assert said.code == 0, said.err
    trace = json.loads(file.read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    assert trace["otherData"]["plan"] == "CommOpt()"
    for rank in (0, 1):
        mine = [event for event in events if event["pid"] == rank]
        spans = defaultdict(list)
        for event in mine:
            if event["ph"] == "X" and event["cat"] == "training":
                spans[event["name"]].append((event["ts"], event["ts"] + event["dur"]))
        backward = sorted(spans["backward"])
        assert len(backward) == len(spans["step"]) == len(spans["kfac.step"]) == STEPS
        messages = intervals(mine)
        factors = [message for message in messages if message["name"] == "factors"]
        assert len(plan.buckets) > 2
        assert len(factors) == STEPS * len(plan.buckets)
        # All leave inside of a backward pass, as every bucket ends with some layer's gradient.
        for message in factors:
            inside = [span for span in backward if span[0] < message["begin"] < span[1]]
            assert len(inside) == 1
            assert min(message["end"], inside[0][1]) > message["begin"]  # seen to overlap
            assert (message["args"]["purpose"], message["args"]["kind"]) == ("factors", "exchange")
        # The bytes are all those that the plan knows of.
        sent = plan.sent(rank)
        assert sum(message["args"]["bytes"] for message in factors) == STEPS * sent.factors > 0
        other = sum(f["args"]["bytes"] for f in messages if f["name"] == "inverses")
        assert other == sent.inverses > 0
        # Launches and waits are calls of the main thread.
        launches = spans["launch factors"]
        assert sorted(begin for begin, _ in launches) == sorted(f["begin"] for f in factors)
        assert len(spans["wait for factors"]) == len(factors)
        # Stages are part of what they are in.
        for stage, whole in (("G", "backward"), ("refresh", "kfac.step"), ("backward", "step")):
            assert spans[stage]
            for begin, end in spans[stage]:
                assert any(a <= begin and end <= b for a, b in spans[whole])
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    check_operations(events)
    check_tables(said.out, plan)


def intervals(events):
    """From launch to arrival, of asynchronous events that belong together."""
    found = defaultdict(dict)
    for event in events:
        if event["ph"] in "be":
            assert event["cat"] == "in message"
            which = {"b": "begin", "e": "end"}[event["ph"]]
            assert which not in found[event["id"]]
            found[event["id"]] |= {which: event["ts"], "name": event["name"], "args": event["args"]}
    assert all({"begin", "end"} <= message.keys() for message in found.values())
    assert all(message["begin"] < message["end"] for message in found.values())
    return list(found.values())


def check_operations(events):
    """Those of rank 0 alone, where its spans say that they must be."""
    operations = [event for event in events if event.get("cat") == "op"]
    assert {event["pid"] for event in operations} == {0}

    slack = 50  # microseconds, of reading two clocks

    def inside(operation, span):
        spans = [e for e in events if e["name"] == span and e["pid"] == 0 and e["ph"] == "X"]
        some = [e for e in operations if e["name"] == operation]
        assert some
        return all(
            any(-slack < e["ts"] - s["ts"] < s["dur"] - e["dur"] + slack for s in spans)
            for e in some
        )

    assert inside("aten::cross_entropy_loss", "forward")
    assert inside("aten::native_layer_norm_backward", "backward")
    assert inside("aten::linalg_eigh", "refresh")


def check_tables(text, plan):
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    sent = [plan.sent(rank) for rank in (0, 1)]
    mean = sum(one.factors for one in sent) / 2
    assert f" {STEPS * len(plan.buckets)} " in lines["factors"]
    assert bytes_text(STEPS * mean) in lines["factors"]
    assert int(lines["factors"].split("%")[0].split()[-1]) > 0
    assert "0%" in lines["inverses"]
    assert {"forward", "backward", "kfac.step", "refresh"} <= lines.keys()


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "ranks"), [("fsdp", "2"), ("plain", "1")], ids=["fsdp", "one process"]
)
def test_other_layouts(natgrad, layout, ranks):
    said = natgrad(
        *("bench", "--network", SHARED, "--sample", "5", "--layout", layout, "--ranks", ranks),
        *("--steps", "1", "--batch", "4", "--placement", "mem", "--inverse", "cholesky"),
    )
    assert said.code == 0, said.err
    assert "unit.cli.nets:Shared, MemOpt(): seconds a step" in said.out
    assert ("Messages of K-FAC" in said.out) == (ranks != "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--network", SHARED),
            f"Network '{SHARED}' does not say what its inputs are: pass the shape of one of them, "
            "such as --sample 3,32,32.",
        ),
        (
            ("--network", "mlp", "--ops"),
            "--ops adds to a trace but there is none: pass --trace FILE, too.",
        ),
        (
            ("--network", "mlp", "--trace", "nowhere/trace.json"),
            "--trace is nowhere/trace.json but there is no folder nowhere: make it, or name a file "
            "elsewhere.",
        ),
        (
            ("--network", "mlp", "--bucket", "large"),
            "--bucket is 'large', which is no number of bytes: write one such as 512MiB, 40GB or "
            "1e9.",
        ),
    ],
)
def test_errors(natgrad, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = natgrad("bench", *arguments)
    assert (said.code, said.err) == (2, f"natgrad: {message}\n")
