"""`natgrad plan` prices whole training steps of the model that it names."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from kfac_keywords import grouped
from natgrad import KFAC, CommOpt, MemOpt
from natgrad.cli.options import network
from natgrad.cli.placements import PlacementComparison
from natgrad.cli.plan_files import fraction_points
from natgrad.cli.step_tables import recommendation
from natgrad.errors import SettingError
from natgrad.lab.models.planned import PLANNED, configured
from natgrad.lab.models.spreading import Layout, spread
from natgrad.lab.models.workload import passes
from natgrad.placement import CLUSTERS, Cluster, Kind, StepModel, rank_memory, simulate
from natgrad.tables import bytes_text, seconds_text
from unit.cli.test_plan import rows

SHARED = "unit.cli.nets:Shared"
COMMAND = ("plan", "--network", "mlp", "--ranks", "4", "--cluster", "v100-112x4", "--batch", "8")


def compared(name="mlp", ranks=4, batch=8, cluster=CLUSTERS["v100-112x4"], limit=None):
    model = network(name).without_weights()
    counted = passes(model, network(name).sample)
    kfac = KFAC(model, kl_clip=None, update_every=10, refresh_every=100, **grouped())
    workload = counted.workload(kfac.blocks, kfac.plan.blocks, batch=batch)
    blocks, world = spread(kfac, ranks, Layout.DDP)
    return PlacementComparison(blocks, world, cluster, limit, workload)


def test_whole_steps_are_those_of_the_model(natgrad):
    said = natgrad(*COMMAND, "--short")
    assert said.code == 0, said.err
    table = rows(said.out, "Placements of mlp")
    ours = compared()
    for strategy in (MemOpt(cluster=ours.cluster), CommOpt(cluster=ours.cluster)):
        plan = strategy(ours.blocks, ours.world)
        model = StepModel(plan, simulate(plan, ours.cluster), ours.workload, ours.cluster)
        (cells,) = (cells for name, cells in table.items() if name.startswith(plan.strategy))
        assert cells[6:8] == [
            seconds_text(model.average(10, 100)),
            bytes_text(rank_memory(model).total),
        ]
    assert said.out.count("Recommended: ") == 1
    assert recommendation(ours) in said.out


def test_stages_of_the_chosen_one(natgrad):
    said = natgrad(*COMMAND, "--placement", "comm")
    table = rows(said.out, "Stages of a training step")
    ours = compared()
    plan = CommOpt()(ours.blocks, ours.world)
    model = StepModel(plan, simulate(plan, ours.cluster), ours.workload, ours.cluster)
    assert table["step"] == [seconds_text(model.step(kind).seconds) for kind in Kind]
    assert table["decompositions"][:3] == ["–"] * 3
    assert table["decompositions"][3] == seconds_text(model.times.stages.decompose)


def test_some_samples_and_narrow_factors_are_planned_for(natgrad, tmp_path):
    """An update with a share of the batch has that share of its products, or of 4 ranks with 8
    samples each one in 32; and factors wider than --max-dim are those of `KFAC(max_dim=)`."""
    file = tmp_path / "plan.json"
    backward, averages = {}, {}
    for options in ((), ("--statistics", "1/4"), ("--statistics", "1"), ("--max-dim", "128")):
        said = natgrad(*COMMAND, "--short", "--placement", "comm", "--json", str(file), *options)
        assert said.code == 0, said.err
        found = json.loads(file.read_text())
        (one,) = (p for p in found["placements"] if p["name"].startswith("CommOpt()"))
        backward[options] = one["steps"]["update"]["stages"]["backward"]
        backward["stale"] = one["steps"]["stale"]["stages"]["backward"]
        averages[options] = one["memory"]["factors"]
    whole = backward[()] - backward["stale"]
    for options, share in ((("--statistics", "1/4"), 1 / 4), (("--statistics", "1"), 1 / 32)):
        assert backward[options] - backward["stale"] == pytest.approx(share * whole)
        assert averages[options] == averages[()]
    narrow = KFAC(network("mlp").without_weights(), kl_clip=None, max_dim=128)
    plan = CommOpt(cluster=CLUSTERS["v100-112x4"])(*spread(narrow, 4, Layout.DDP))
    assert averages["--max-dim", "128"] == plan.fullest().factors < averages[()] / 2


def test_numbers_as_json(natgrad, tmp_path):
    file = tmp_path / "plan.json"
    said = natgrad(*COMMAND, "--short", "--json", str(file), "--sweep-ranks", "1,2")
    assert said.code == 0, said.err
    found = json.loads(file.read_text())
    ours = compared()
    assert found["recommendation"] == recommendation(ours)
    assert found["workload"]["batch"] == 8
    for written, one in zip(found["placements"], ours.trained, strict=True):
        assert written["name"] == one.name
        assert written["training_step"] == pytest.approx(one.seconds)
        assert written["memory"]["total"] == one.memory.total
        assert written["memory"] == one.memory.kinds() | {"total": one.memory.total}
        step = written["steps"]["stale"]
        assert step["seconds"] == pytest.approx(one.model.step(Kind.STALE).seconds)
    assert [point["ranks"] for point in found["sweep"]] == [1, 2]
    assert found["sweep"][0]["efficiency"] == 1.0


def test_a_sweep_over_ranks(natgrad):
    said = natgrad(*COMMAND, "--short", "--placement", "mem", "--sweep-ranks", "1,2,4")
    table = rows(said.out, "mlp by number of ranks")
    assert list(table) == ["1", "2", "4"]
    alone = compared(ranks=1).trained[0]
    assert table["1"][:2] == [seconds_text(alone.seconds), "100.0%"]
    best = compared(ranks=4)
    model = StepModel(
        plan := MemOpt()(best.blocks, best.world),
        simulate(plan, best.cluster),
        best.workload,
        best.cluster,
    )
    assert table["4"][0] == seconds_text(model.average(10, 100))
    assert table["4"][1] == f"{alone.seconds / model.average(10, 100):.1%}"


def test_fractions_from_the_least_workers_to_the_most():
    points = fraction_points(compared(ranks=8))
    assert [name.split(" = ")[0] for name, _, _ in points] == [
        "MemOpt()",
        "Hybrid(1/4)",
        "Hybrid(1/2)",
        "CommOpt()",
    ]
    memory = [kept for _, _, kept in points]
    assert memory[0] < memory[-1]


def test_pictures(natgrad, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"{name}.png" for name in ("timeline", "sweep-fractions")}
    files["draw-sweep"] = tmp_path / "sweep.png"
    options = [part for name, file in files.items() for part in (f"--{name}", str(file))]
    said = natgrad(*COMMAND, "--short", "--sweep-ranks", "1,4", *options)
    assert said.code == 0, said.err
    for file in files.values():
        assert file.read_bytes().startswith(b"\x89PNG")
        assert f"drawn in {file}." in said.out


class TestRecommendation:
    def test_names_the_fastest_training_step(self):
        ours = compared()
        best = ours.recommended()
        allowed = [one for one in ours.trained if one.name != "Local()"]
        assert best.seconds == min(one.seconds for one in allowed)
        assert recommendation(ours).startswith(f"Recommended: {best.name}, whose average")

    def test_says_what_fits(self):
        said = recommendation(compared())
        assert said.endswith("samples.")
        assert " of 16.0 GiB, which has room for " in said
        assert " of " not in recommendation(compared(cluster=Cluster())).split("a rank ")[1]

    def test_nothing_fits(self):
        said = recommendation(compared(cluster=Cluster(capacity=1e6)))
        assert said.startswith("Nothing fits: the least is ")
        assert said.endswith("so use --layout fsdp or a smaller --batch.")
        said = recommendation(compared(batch=1, cluster=Cluster(capacity=1e6)))
        assert said.endswith("so use --layout fsdp or a smaller --sample.")


def test_two_levels(natgrad):
    """Fewer hops of the rings around 256 GPUs."""
    command = ("plan", "--network", "resnet20", "--ranks", "256", "--placement", "mem", "--short")
    found = {}
    for options in ((), ("--two-levels",)):
        said = natgrad(*command, "--cluster", "v100-112x4", *options)
        assert said.code == 0, said.err
        (found[options],) = (
            cells[0]
            for name, cells in rows(said.out, "Placements of resnet20").items()
            if name.startswith("MemOpt()")
        )
    ours = compared("resnet20", 256, 32)
    for options, two_levels in (((), False), (("--two-levels",), True)):
        cluster = replace(ours.cluster, two_levels=two_levels)
        plan = MemOpt(cluster=cluster)(ours.blocks, ours.world)
        assert found[options] == seconds_text(simulate(plan, cluster).step_seconds(10, 100))
    assert found[()] != found["--two-levels",]


class TestErrors:
    def test_two_levels_of_one(self, natgrad):
        said = natgrad(*COMMAND[:5], "--two-levels")
        assert said.code == 2
        assert said.err.rstrip() == (
            "natgrad: --two-levels is given but --cluster default has one rank in a node: leave it "
            "out, or name one of v100-1088x4, v100-112x4, a100-24x8, h100x8."
        )

    def test_more_ranks_than_there_are(self, natgrad):
        said = natgrad(*COMMAND[:4], "449", *COMMAND[5:])
        assert said.code == 2
        assert said.err.startswith("natgrad: 449 ranks are asked for but cluster 'v100-112x4' has")

    def test_no_shape_of_the_inputs(self, natgrad, tmp_path):
        file = tmp_path / "x.json"
        said = natgrad("plan", "--network", SHARED, "--ranks", "2", "--json", str(file))
        assert said.code == 2
        assert said.err.startswith(f"natgrad: Network {SHARED!r} does not say what its inputs are")
        assert not file.exists()

    def test_nothing_to_draw(self, natgrad):
        said = natgrad(*COMMAND, "--draw-sweep", "x.png")
        assert said.code == 2
        assert said.err.startswith("natgrad: --draw-sweep x.png draws what --sweep-ranks compares")

    def test_json_into_no_folder(self, natgrad, tmp_path):
        file = tmp_path / "nowhere" / "x.json"
        said = natgrad(*COMMAND, "--short", "--json", str(file))
        assert said.code == 2
        assert said.err.startswith(f"natgrad: The numbers cannot be written to --json {file} (")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("unet", 7_763_041),
        ("llama-7b", 6_738_415_616),
    ],
)
def test_planned_networks(name, parameters):
    planned = PLANNED[name]
    model = planned.without_weights()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.is_meta for p in model.parameters())
    found = passes(model, planned.sample)
    assert found.parameters == parameters
    assert 1.8 < found.backward / found.forward < 2.3


def test_mask_rcnn_is_planned_without_its_training_step(natgrad, tmp_path):
    """Its shapes depend on the data: K-FAC is planned, and whoever wants more is told."""
    pytest.importorskip("torchvision")
    command = ("plan", "--network", "mask-rcnn", "--ranks", "8", "--short")
    said = natgrad(*command)
    assert said.code == 0, said.err
    assert "Placements of mask-rcnn on 8 ranks" in said.out
    assert "training step" not in said.out
    said = natgrad(*command, "--json", str(tmp_path / "x.json"))
    assert said.code == 2
    assert said.err.startswith("natgrad: Network 'mask-rcnn' does not say what its inputs are")
    said = natgrad(*command, "--sample", "3,64,64")
    assert said.code == 2
    assert "cannot be counted without numbers (" in said.err
    assert "if shapes depend on the data, leave it out and plan K-FAC alone." in said.err


def test_mask_rcnn_without_torchvision(natgrad, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    said = natgrad("plan", "--network", "mask-rcnn", "--ranks", "8")
    assert said.code == 2
    assert said.err.rstrip() == (
        "natgrad: Mask R-CNN needs torchvision, which is not installed: pip install "
        "'natgrad[vision]'."
    )


def test_bert_large():
    pytest.importorskip("transformers")
    planned = PLANNED["bert-large"]
    found = passes(planned.without_weights(), planned.sample)
    assert found.parameters == 335_174_458  # with the head for masked tokens
    # Twice for each weight but those that are looked up, and attention's scores and values.
    weights = 24 * 12 * 1024**2 + 1024**2 + 30522 * 1024
    expected = 512 * (2 * weights + 24 * 4 * 512 * 1024)
    assert found.forward == pytest.approx(expected, rel=1e-3)


class TestConfigurations:
    def test_of_transformers(self, tmp_path):
        pytest.importorskip("transformers")
        file = tmp_path / "config.json"
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        file.write_text(json.dumps({"model_type": "bert", "intermediate_size": 64, **sizes}))
        found = configured(file)
        assert found.sample == (512,)
        model = found.without_weights()
        assert all(p.is_meta for p in model.parameters())
        assert passes(model, found.sample).forward > 0

    def test_of_an_image(self, tmp_path):
        pytest.importorskip("transformers")
        file = tmp_path / "config.json"
        file.write_text(json.dumps({"model_type": "vit", "image_size": 32, "patch_size": 8}))
        assert configured(file).sample == (3, 32, 32)

    @pytest.mark.parametrize("text", [None, "no json", '{"model_type": "none such"}', "{}"])
    def test_that_cannot_be_read(self, tmp_path, text):
        pytest.importorskip("transformers")
        file = tmp_path / "config.json"
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingError, match="is no configuration that transformers can read"):
            configured(file)


def test_counting_changes_nothing():
    """The plan is that of a model nobody has counted."""
    model = network("mlp").without_weights()
    before = KFAC(model, kl_clip=None).plan
    other = network("mlp").without_weights()
    passes(other, (784,))
    assert KFAC(other, kl_clip=None).plan == before
    assert torch.is_grad_enabled()
