"""The one line inside the trainers of other libraries has the weights of the two lines in a plain
loop, bit by bit: with accumulation, clipping, half precision, scalers, and in resumed runs."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset

import natgrad
from natgrad.errors import SettingError

pytestmark = [
    pytest.mark.slow,
    # Of the frameworks themselves, and of what they call.
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::UserWarning:natgrad"),
]
STEPS, SIZE = 6, 4
SETTINGS = {"update_every": 1, "refresh_every": 2}


@dataclass(frozen=True)
class Loop:
    """What a training loop does beside training."""

    accumulates: int = 1
    clips: float | None = None
    dtype: torch.dtype | None = None
    scales: bool = False
    resumes: bool = False


LOOPS = {
    "plain": Loop(),
    "accumulation": Loop(accumulates=2),
    "clip": Loop(clips=0.05),
    "bf16": Loop(dtype=torch.bfloat16),
    "scaler": Loop(scales=True),
    "scaler, clip": Loop(scales=True, clips=0.05, accumulates=2),
    "resume": Loop(resumes=True, accumulates=2),
}
loops = pytest.mark.parametrize("name", LOOPS)
kinds = pytest.mark.parametrize("kind", ["attached", "NaturalMuon", "dogleg"])
DOGLEG = {"length": natgrad.lengths.Dogleg()}


class Numbers(Dataset):
    """Reproducible, and in their order."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 5, generator=generator)
        self.labels = torch.randint(3, (count,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.labels[index]}


def data(loop):
    return Numbers(STEPS * SIZE * loop.accumulates)


class Net(nn.Module):
    """With its loss inside, as transformers have it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def optimizer_of(model, kind):
    if kind == "NaturalMuon":
        return natgrad.NaturalMuon(model, **SETTINGS)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def one_line(model, optimizer, kind, **more):
    """The line that a user adds, if any."""
    if kind in ("attached", "dogleg"):
        length = DOGLEG if kind == "dogleg" else {}
        natgrad.KFAC(model, optimizer, **SETTINGS, **length).attach(**more)


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def expected(loop, kind, casts=False):
    """A plain loop with two lines, or the one where there are no two. ``casts``: inputs have the
    dtype of autocast from the start."""
    model = Net()
    optimizer = optimizer_of(model, kind)
    scale = scaler() if loop.scales else None
    kfac = None
    if kind == "dogleg":
        natgrad.KFAC(model, optimizer, scaler=scale, **SETTINGS, **DOGLEG).attach()
    elif kind != "NaturalMuon":
        kfac = natgrad.KFAC(model, optimizer, scaler=scale, **SETTINGS)
    half = torch.autocast("cpu", loop.dtype) if loop.dtype else contextlib.nullcontext()
    batches = iter(DataLoader(data(loop), SIZE))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(loop.accumulates):
            batch = next(batches)
            if casts:
                batch["x"] = batch["x"].to(loop.dtype)
            with half:
                loss = model(**batch)["loss"]
            loss = loss / loop.accumulates
            (loss if scale is None else scale.scale(loss)).backward()
        if loop.clips:
            if scale is not None:
                scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), loop.clips)
        if kfac is not None:
            kfac.step()
        if scale is None:
            optimizer.step()
        else:
            scale.step(optimizer)
            scale.update()
    return flat(model)


def check(found, loop, kind, casts=False):
    assert torch.equal(found, expected(loop, kind, casts))


class TestAccelerate:
    @staticmethod
    def run(loop, kind, folder):
        accelerate = pytest.importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        steps = (range(3), range(3, STEPS)) if loop.resumes else (range(STEPS),)
        for part, these in enumerate(steps):
            accelerator = accelerate.Accelerator(
                cpu=True,
                gradient_accumulation_steps=loop.accumulates,
                mixed_precision="bf16" if loop.dtype else "no",
            )
            if loop.scales:
                accelerator.scaler = scaler()
            model = Net()
            optimizer = optimizer_of(model, kind)
            loader = DataLoader(data(loop), SIZE)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            one_line(model, optimizer, kind, all_ranks_save=True)
            if part:
                accelerator.load_state(folder)
            for index, batch in enumerate(loader):
                if index // loop.accumulates not in these:
                    continue
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch)["loss"])
                    if loop.clips and accelerator.sync_gradients:
                        if loop.scales:  # as it does itself on GPUs
                            accelerator.scaler.unscale_(optimizer.optimizer)
                        accelerator.clip_grad_norm_(model.parameters(), loop.clips)
                    optimizer.step()
                    optimizer.zero_grad()
            if loop.resumes and not part:
                accelerator.save_state(folder)
        kfac = optimizer.optimizer.kfac if kind == "NaturalMuon" else None
        assert kfac is None or kfac.steps == STEPS
        return flat(model)

    @loops
    @kinds
    def test_is_the_plain_loop(self, name, kind, tmp_path):
        loop = LOOPS[name]
        check(self.run(loop, kind, str(tmp_path)), loop, kind)

    def test_accumulation_is_one_step_of_kfac(self):
        """The two lines inside of ``accumulate`` would be as many as there are micro-batches."""
        accelerate = pytest.importorskip("accelerate")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = Net()
        model, optimizer = accelerator.prepare(model, optimizer_of(model, "attached"))
        kfac = natgrad.KFAC(model, optimizer, **SETTINGS).attach()
        for batch in DataLoader(Numbers(8 * SIZE), SIZE):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert kfac.steps == 2


class TestTransformers:
    @staticmethod
    def trainer(loop, kind, folder, steps, **more):
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("accelerate")

        class InOrder(transformers.Trainer):
            def _get_train_sampler(self, *args, **kwargs):
                return SequentialSampler(self.train_dataset)

        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=loop.accumulates,
            max_steps=steps,
            max_grad_norm=loop.clips or 0.0,
            bf16=loop.dtype is not None,
            use_cpu=True,
            learning_rate=0.01,
            weight_decay=0.1,
            lr_scheduler_type="constant",
            save_strategy="steps" if loop.resumes else "no",
            save_steps=3,
            logging_steps=2,
            report_to=[],
            disable_tqdm=True,
        )
        model = Net()
        if kind == "callback":
            callback = natgrad.integrations.transformers.KFACCallback(**SETTINGS)
            more["callbacks"] = [callback]
            weights = {"weight_decay": 0.1, "params": list(model.parameters())}
            optimizer = torch.optim.AdamW([weights], lr=0.01)
        else:
            optimizer = optimizer_of(model, kind)
            one_line(model, optimizer, kind)
        return InOrder(
            model, arguments, train_dataset=data(loop), optimizers=(optimizer, None), **more
        )

    @loops
    @pytest.mark.parametrize("kind", ["attached", "NaturalMuon", "callback", "dogleg"])
    def test_is_the_plain_loop(self, name, kind, tmp_path, capsys):
        loop = LOOPS[name]
        if loop.scales:
            pytest.skip("transformers take 16 bits with a scaler on GPUs alone")
        if loop.resumes:
            self.trainer(loop, kind, tmp_path, 3).train()
        trainer = self.trainer(loop, kind, tmp_path, STEPS)
        trainer.train(resume_from_checkpoint=True if loop.resumes else None)
        check(flat(trainer.model), loop, "attached" if kind == "callback" else kind)

    def test_values_are_logged(self, tmp_path, capsys):
        trainer = self.trainer(LOOPS["plain"], "callback", tmp_path, STEPS)
        trainer.train()
        (first, *_) = trainer.state.log_history
        assert first["kfac/damping"] == 0.01
        assert 0 < first["kfac/step_scale"] <= 1
        assert first["kfac/zeroed_steps"] == first["kfac/failed_decompositions"] == 0

    def test_a_checkpoint_from_elsewhere_is_asked_for(self, tmp_path, capsys):
        loop = LOOPS["resume"]
        self.trainer(loop, "callback", tmp_path / "one", 3).train()
        folder = str(tmp_path / "one" / "checkpoint-3")
        other = self.trainer(loop, "callback", tmp_path / "other", STEPS)
        with pytest.warns(UserWarning, match=r"No state of K-FAC.*resume_from_checkpoint"):
            other.train(resume_from_checkpoint=folder)
        told = self.trainer(loop, "callback", tmp_path / "told", STEPS)
        told.args.resume_from_checkpoint = folder
        told.train(resume_from_checkpoint=folder)
        check(flat(told.model), loop, "attached")

    def test_settings_of_one_that_is_made(self):
        callbacks = natgrad.integrations.transformers
        kfac = natgrad.KFAC(Net(), kl_clip=None)
        with pytest.raises(SettingError, match="kfac is made, so that damping would change nothin"):
            callbacks.KFACCallback(kfac, damping=1.0)


def lightning_module(kind, lightning, calls):
    """``calls``: the module itself, or the network in it."""

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, labels):
            return self.net(x, labels)

        def training_step(self, batch, index):
            return (self if calls == "itself" else self.net)(**batch)["loss"]

        def configure_optimizers(self):
            optimizer = optimizer_of(self.net, "attached" if kind == "callback" else kind)
            one_line(self.net, optimizer, kind, all_ranks_save=True)
            return optimizer

    return Module()


class TestLightning:
    @staticmethod
    def fitted(loop, kind, folder, calls="itself", **more):
        lightning = pytest.importorskip("lightning.pytorch")
        from lightning.pytorch.plugins import MixedPrecision

        path, numbers = None, data(loop)
        parts = [numbers]
        if loop.resumes:  # at the end of an epoch: what is left of one is not read again
            half = len(numbers) // 2
            parts = [Subset(numbers, range(half)), Subset(numbers, range(half, 2 * half))]
        for epoch, part in enumerate(parts, 1):
            if loop.dtype:
                more["precision"] = "bf16-mixed"
            if loop.scales:  # without the autocast that comes with it
                plugin = MixedPrecision("16-mixed", "cpu", scaler())
                plugin.autocast_context_manager = contextlib.nullcontext
                more["plugins"] = [plugin]
            callbacks = []
            if kind == "callback":
                callbacks = [natgrad.integrations.lightning.KFACCallback("net", **SETTINGS)]
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=1,
                max_epochs=epoch,
                accumulate_grad_batches=loop.accumulates,
                gradient_clip_val=loop.clips,
                callbacks=callbacks,
                default_root_dir=folder,
                **{"logger": False, **more},
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            module = lightning_module(kind, lightning, calls)
            trainer.fit(module, DataLoader(part, SIZE), ckpt_path=path)
            path = str(folder / "saved.ckpt")
            trainer.save_checkpoint(path)
        return trainer, module

    @loops
    @pytest.mark.parametrize("kind", ["attached", "NaturalMuon", "callback", "dogleg"])
    def test_is_the_plain_loop(self, name, kind, tmp_path):
        loop = LOOPS[name]
        calls = "itself" if len(name) % 2 else "its network"
        _, module = self.fitted(loop, kind, tmp_path, calls)
        check(flat(module.net), loop, "attached" if kind == "callback" else kind)

    def test_the_whole_module(self, tmp_path):
        """Batches are mappings and lists there; samples are counted all the same."""
        lightning = pytest.importorskip("lightning.pytorch")
        callback = natgrad.integrations.lightning.KFACCallback(**SETTINGS)
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        module = lightning_module("callback", lightning, "itself")
        trainer.fit(module, DataLoader(data(Loop()), SIZE))
        check(flat(module.net), Loop(), "attached")
        first = callback.kfac
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, DataLoader(data(Loop()), SIZE))
        assert first.detached
        assert callback.kfac.steps == STEPS

    def test_values_are_logged(self, tmp_path):
        from lightning.pytorch.loggers import CSVLogger

        logger = CSVLogger(tmp_path)
        self.fitted(LOOPS["plain"], "callback", tmp_path, logger=logger, log_every_n_steps=2)
        text = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
        assert "kfac/damping" in text
        assert "0.0099999" in text  # as a number of 32 bits


class TestFabric:
    @loops
    @kinds
    def test_is_the_plain_loop(self, name, kind, tmp_path):
        pytest.importorskip("lightning.fabric")
        from lightning.fabric import Fabric
        from lightning.fabric.plugins import MixedPrecision

        loop = LOOPS[name]
        more = {"precision": "bf16-mixed"} if loop.dtype else {}
        if loop.scales:
            plugin = MixedPrecision("16-mixed", "cpu", scaler())
            plugin.forward_context = contextlib.nullcontext
            plugin.convert_input = plugin.convert_output = lambda data: data
            more["plugins"] = [plugin]
        steps = (range(3), range(3, STEPS)) if loop.resumes else (range(STEPS),)
        for part, these in enumerate(steps):
            fabric = Fabric(accelerator="cpu", devices=1, **more)
            model = Net()
            optimizer = optimizer_of(model, kind)
            model, optimizer = fabric.setup(model, optimizer)
            one_line(model, optimizer, kind)
            state = {"model": model, "optimizer": optimizer}
            if part:
                fabric.load(tmp_path / "saved.ckpt", state)
            batches = list(DataLoader(data(loop), SIZE))
            for step in these:
                optimizer.zero_grad()
                for micro in range(loop.accumulates):
                    batch = batches[step * loop.accumulates + micro]
                    fabric.backward(model(**batch)["loss"] / loop.accumulates)
                if loop.clips:
                    fabric.clip_gradients(model, optimizer, max_norm=loop.clips)
                optimizer.step()
            fabric.save(tmp_path / "saved.ckpt", state)
        check(flat(model), loop, kind, casts=loop.dtype is not None)


def test_the_page_of_the_documents_runs(tmp_path, monkeypatch, capsys):
    for library in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "docs" / "frameworks.md"
    source = "".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
    assert source.count(".attach(") == 6
    exec(compile(source, str(page), "exec"), {"__name__": "frameworks"})


def test_nothing_here_is_true_by_accident():
    """Loops, and K-FAC in them, make a difference; a scaler and a resumed run make none."""
    found = {name: expected(loop, "attached") for name, loop in LOOPS.items()}
    assert torch.equal(found["resume"], found["accumulation"])
    torch.testing.assert_close(found["scaler"], found["plain"])
    model = Net()
    optimizer = optimizer_of(model, "attached")
    for batch in DataLoader(data(Loop()), SIZE):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    found["without"] = flat(model)
    different = [found[n] for n in ("without", "plain", "accumulation", "clip", "bf16")]
    for i, one in enumerate(different):
        assert all((one - other).abs().max() > 1e-4 for other in different[:i])
