"""Every message says what was given and what to do about it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

import natgrad
from natgrad import KFAC
from natgrad.errors import CaptureError, CoverageError, SettingError
from training_loops import MLP, NETS, backward, often


def kfac(model=None, **settings):
    return KFAC(model or MLP.model(), kl_clip=None, **settings)


def says(error, message, make, *args, **kwargs):
    """The whole message, word by word."""
    with pytest.raises(error) as caught:
        make(*args, **kwargs)
    assert str(caught.value) == message


class TestArguments:
    def test_model(self):
        says(
            SettingError,
            "model is a list but must be a torch.nn.Module: pass the network.",
            lambda: KFAC([nn.Linear(2, 2)], kl_clip=None),
        )

    def test_optimizer(self):
        says(
            SettingError,
            "optimizer is a float but must be a torch.optim.Optimizer, a list of them, or None: "
            "pass the optimizer whose step() follows.",
            lambda: KFAC(MLP.model(), 0.1),
        )

    def test_no_optimizer_to_ask(self):
        says(
            SettingError,
            "kl_clip=0.01 needs the learning rate, and there is no optimizer to ask: pass "
            "KFAC(model, optimizer), or kl_clip=None.",
            lambda: KFAC(MLP.model()),
        )

    @pytest.mark.parametrize("given", ["exact", natgrad.ExactFisher], ids=repr)
    def test_curvature(self, given):
        says(
            SettingError,
            f"curvature is {given!r} but must be a Fisher: pass natgrad.EmpiricalFisher(), "
            "natgrad.MonteCarloFisher(), natgrad.ExactFisher() or natgrad.curvature.GaussNewton().",
            lambda: kfac(curvature=given),
        )

    @pytest.mark.parametrize("given", ["eigen", natgrad.Cholesky], ids=repr)
    def test_inverse(self, given):
        says(
            SettingError,
            f"inverse is {given!r} but must be an inverse: pass natgrad.Eigen() or "
            "natgrad.Cholesky().",
            lambda: kfac(inverse=given),
        )

    @pytest.mark.parametrize("given", ["full", natgrad.EKFAC], ids=repr)
    def test_structure(self, given):
        says(
            SettingError,
            f"structure is {given!r} but must be a structure or a function of a layer: pass an "
            "object such as natgrad.Kronecker().",
            lambda: kfac(structure=given),
        )

    @pytest.mark.parametrize("given", [torch.int32, "bfloat16"])
    def test_factor_dtype(self, given):
        says(
            SettingError,
            f"factor_dtype is {given!r} but must be a floating-point dtype or None: pass one such "
            "as torch.bfloat16.",
            lambda: kfac(factor_dtype=given),
        )

    def test_half_products(self):
        says(
            SettingError,
            f"half_products is {torch.bfloat16!r} but must be True, False or None: pass None for "
            "16-bit products where the device gains by them.",
            lambda: kfac(half_products=torch.bfloat16),
        )

    def test_batch_axis(self):
        says(
            SettingError,
            "MeanLoss.batch_axis is -1 but must be a whole number of at least 0: pass such an int.",
            lambda: natgrad.MeanLoss(batch_axis=-1),
        )
        says(
            SettingError,
            "SumLoss.batch_axis is 0.5 but must be a whole number of at least 0: pass such an int.",
            lambda: natgrad.SumLoss(batch_axis=0.5),
        )

    @pytest.mark.parametrize("given", [-3, 2.5, True, float("nan"), "a"])
    def test_samples_of_a_step(self, given):
        it = kfac()
        with pytest.raises(
            SettingError, match=rf"step\(samples=...\) got {given!r} but needs a who"
        ):
            it.step(samples=given)

    def test_scaler(self):
        says(
            SettingError,
            "scaler is a float but must be a torch.amp.GradScaler or None: pass the one that "
            "scales the loss.",
            lambda: kfac(scaler=2.0),
        )

    def test_scaler_without_an_optimizer(self):
        says(
            SettingError,
            "scaler needs the optimizer whose gradients it unscales: pass KFAC(model, optimizer, "
            "scaler=scaler).",
            lambda: kfac(scaler=torch.amp.GradScaler("cpu")),
        )


class TestSettings:
    @pytest.mark.parametrize(
        ("name", "given", "allowed"),
        [
            ("damping", -1.0, "finite and at least 0"),
            ("damping", "small", "finite and at least 0"),
            ("norm_damping", None, "finite and at least 0"),
            ("factor_decay", 1.0, "in [0, 1)"),
            ("factor_decay", -0.1, "in [0, 1)"),
            ("norm_damping", float("inf"), "finite and at least 0"),
        ],
    )
    def test_numbers(self, name, given, allowed):
        says(
            SettingError,
            f"{name} is {given!r} but must be {allowed}: pass such a number, or a function of the "
            "step that returns one.",
            lambda: kfac(**{name: given}),
        )

    def test_kl_clip(self):
        model = MLP.model()
        says(
            SettingError,
            "kl_clip is 0 but must be finite and above 0: pass such a number, or a function of the "
            "step that returns one.",
            lambda: KFAC(model, SGD(model.parameters(), lr=0.1), kl_clip=0),
        )

    def test_a_function_that_leaves_its_range_later(self):
        model = MLP.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        it = KFAC(model, optimizer, **often(damping=lambda step: 1e-2 - 1e-2 * step))
        for _ in range(2):
            backward(model, optimizer, it, *MLP.batch())
            it.step()
        says(
            SettingError,
            "damping is -0.01 at step 2 but must be finite and at least 0: correct the function "
            "passed as damping.",
            it.step,
        )

    def test_terms_per_sample(self):
        for loss in (natgrad.MeanLoss, natgrad.SumLoss):
            says(
                SettingError,
                f"{loss.__name__}.terms_per_sample is 0 but must be finite and above 0: pass such "
                "a number.",
                loss,
                terms_per_sample=0,
            )

    @pytest.mark.parametrize("given", ["mean", F.cross_entropy, natgrad.SumLoss])
    def test_loss(self, given):
        says(
            SettingError,
            f"loss is {given!r} but must say how the loss adds up its samples: pass "
            "natgrad.MeanLoss() or natgrad.SumLoss().",
            lambda: kfac(loss=given),
        )

    @pytest.mark.parametrize("given", [["box"], {1: 2}], ids=repr)
    def test_regions(self, given):
        says(
            SettingError,
            f"MeanLoss.regions is {given!r} but must map patterns of modules to numbers: pass one "
            "such as {'roi_heads.*': 1}.",
            lambda: natgrad.MeanLoss(regions=given),
        )
        says(
            SettingError,
            "MeanLoss.regions['box'] is 0 but must be finite and above 0: pass such a number.",
            lambda: natgrad.MeanLoss(regions={"box": 0}),
        )

    @pytest.mark.parametrize("given", [None, "auto", natgrad.Distributed], ids=repr)
    def test_distributed(self, given):
        says(
            SettingError,
            f"distributed is {given!r} but must be a natgrad.Distributed: pass "
            "natgrad.Distributed().",
            lambda: kfac(distributed=given),
        )

    def test_a_placement_as_distributed(self):
        given = natgrad.CommOpt()
        says(
            SettingError,
            f"distributed is {given!r} but must be a natgrad.Distributed: pass "
            f"natgrad.Distributed(placement={given!r}).",
            lambda: kfac(distributed=given),
        )

    @pytest.mark.parametrize("given", ["auto", natgrad.CommOpt, 0.5], ids=repr)
    def test_placement(self, given):
        says(
            SettingError,
            f"Distributed.placement is {given!r} but must be a placement: pass an object such as "
            "natgrad.CommOpt() or natgrad.Hybrid(0.5).",
            lambda: natgrad.Distributed(given),
        )

    @pytest.mark.parametrize("given", [torch.int32, "bfloat16", "float21"], ids=repr)
    def test_wire_dtype(self, given):
        says(
            SettingError,
            f"Distributed.wire_dtype is {given!r} but must be None or one of torch.float64, "
            "torch.float32, natgrad.comm.float21, torch.bfloat16, torch.float16: pass "
            "torch.bfloat16 for half the bytes.",
            lambda: natgrad.Distributed(wire_dtype=given),
        )

    def test_how_factors_travel(self):
        says(
            SettingError,
            "Distributed.packed is 'yes' but must be True or False: pass True for half the bytes.",
            lambda: natgrad.Distributed(packed="yes"),
        )
        says(
            SettingError,
            "Distributed.bucket_bytes is 0 but must be a whole number of at least 1: pass such an "
            "int.",
            lambda: natgrad.Distributed(bucket_bytes=0),
        )

    @pytest.mark.parametrize("name", ["update_every", "refresh_every"])
    def test_intervals(self, name):
        says(
            SettingError,
            f"{name} is 0 but must be a whole number of at least 1: pass such an int.",
            lambda: kfac(**{name: 0}),
        )
        says(
            SettingError,
            f"{name} is a mapping with the keys ['A', 'B'] but must have exactly 'A' and 'G': give "
            "an interval for each.",
            lambda: kfac(**{name: {"A": 1, "B": 2}}),
        )

    @pytest.mark.parametrize(
        "given", [natgrad.schedules.Drift(0.1), {"A": natgrad.schedules.Drift(0.1), "G": 1}]
    )
    def test_drift_of_what_is_not_updated(self, given):
        says(
            SettingError,
            "update_every is a Drift but must be an int or a function of the step: drift can only "
            "be measured on updated factors, so pass Drift as refresh_every.",
            lambda: kfac(update_every=given),
        )

    def test_levenberg_marquardt(self):
        says(
            SettingError,
            "LevenbergMarquardt.start is 0 but must be finite and above 0: pass such a number.",
            lambda: natgrad.schedules.LevenbergMarquardt(start=0),
        )
        says(
            SettingError,
            "LevenbergMarquardt.decay is 1.0 but must be in (0, 1): pass such a number.",
            lambda: natgrad.schedules.LevenbergMarquardt(decay=1.0),
        )
        says(
            SettingError,
            "LevenbergMarquardt.every is 2.5 but must be a whole number of at least 1: pass such "
            "an int.",
            lambda: natgrad.schedules.LevenbergMarquardt(every=2.5),
        )

    def test_adapt_without_a_rule(self):
        says(
            SettingError,
            "adapt() needs a damping that adapts, but damping is 0.02: pass "
            "damping=natgrad.schedules.LevenbergMarquardt() to KFAC.",
            lambda: kfac(damping=0.02).adapt(1.0, 0.5),
        )


class TestCoverage:
    def test_no_layer(self):
        with pytest.raises(CoverageError) as caught:
            kfac(nn.PReLU(3))
        message = str(caught.value)
        assert message.startswith(
            "PReLU has no layer that KFAC can precondition (PReLU: no layer is registered for "
            "PReLU). Supported are "
        )
        assert "Linear" in message
        assert message.endswith("; add your own with @natgrad.register.")

    def test_complex_numbers(self):
        it = kfac(nn.Sequential(nn.Linear(4, 3, dtype=torch.complex64), nn.Linear(3, 3)))
        assert [block.name for block in it.blocks] == ["1"]
        assert it.uncovered["0.weight"].reason == "its numbers are complex"

    def test_no_parameters(self):
        with pytest.raises(CoverageError, match=r"ReLU has no layer .* \(it has no parameters\)"):
            kfac(nn.ReLU())

    def test_everything_is_left_out(self):
        frozen = MLP.model().requires_grad_(False)
        with pytest.raises(CoverageError, match=r"Sequential has no layer .* frozen"):
            kfac(frozen)
        with pytest.raises(CoverageError, match=r"\(Linear: excluded\). Supported are"):
            kfac(exclude=["*"])

    def test_what_is_frozen_is_counted_and_not_listed(self):
        """An adapter of vectors alone, in front of a large model that is frozen."""
        base = nn.ModuleList(nn.Linear(2, 2) for _ in range(50)).requires_grad_(False)
        model = nn.ModuleDict({"base": base, "scale": nn.ParameterDict({"a": torch.ones(2)})})
        with pytest.raises(CoverageError) as caught:
            kfac(model)
        assert str(caught.value).startswith(
            "ModuleDict has no layer that KFAC can precondition (ParameterDict: no layer is "
            "registered for ParameterDict; 100 other parameters are frozen). Supported are "
        )
        one = nn.Linear(2, 1, bias=False).requires_grad_(False)
        with pytest.raises(CoverageError, match=r"\(1 parameter is frozen\). Supported are"):
            kfac(one)

    def test_of_many_reasons_some_are_listed(self):
        names = [f"Own{letter}" for letter in "ABCDEFGHIJKL"]
        kinds = [type(name, (nn.PReLU,), {"forward": lambda self, x: x}) for name in names]
        with pytest.raises(CoverageError) as caught:
            kfac(nn.Sequential(*(kind() for kind in kinds)))
        last = "OwnG: no layer is registered for OwnG; OwnH: no layer is registered for OwnH"
        assert f"{last}; 4 more). Supported are " in str(caught.value)

    def test_a_function_that_returns_no_structure(self):
        says(
            CoverageError,
            "The function passed as structure returned 'full' for Linear '0'; return a structure "
            "such as natgrad.Kronecker().",
            lambda: kfac(structure=lambda layer: "full"),
        )

    def test_ekfac_without_an_eigenbasis(self):
        says(
            CoverageError,
            "EKFAC() works in an eigenbasis, which Cholesky() does not give. Use "
            "inverse=natgrad.Eigen(), or structure=natgrad.Kronecker() with it.",
            lambda: kfac(structure=natgrad.EKFAC(), inverse=natgrad.Cholesky()),
        )

    def test_one_weight_as_two_matrices(self):
        model = nn.Module()
        model.one, model.two = nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False)
        model.two.weight = model.one.weight
        says(
            CoverageError,
            "Linear 'two' and Linear 'one' share a weight but see it as different matrices. Leave "
            "one of them out with exclude=[...].",
            lambda: kfac(model),
        )

    def test_lazy_modules(self):
        says(
            CoverageError,
            "LazyLinear '0' has parameters without a shape yet. Run one batch through the model "
            "before making KFAC (and the optimizer).",
            lambda: kfac(nn.Sequential(nn.LazyLinear(3))),
        )

    @pytest.mark.parametrize("label", ["include", "exclude"])
    def test_patterns_that_match_nothing(self, label):
        says(
            CoverageError,
            f"{label} has 'head', which matches no module of Sequential. Names are those of "
            "named_modules(), such as '4'.",
            lambda: kfac(**{label: ["head"]}),
        )
        says(
            CoverageError,
            f"{label} has 'Linear', which matches no module of Sequential. Names are those of "
            "named_modules(), such as '4'.",
            lambda: kfac(**{label: nn.Linear(2, 2)}),
        )

    def test_too_large_a_block(self):
        says(
            CoverageError,
            "The full block of Linear '0' has 30 x 30 entries (3.35e-06 GiB), above the limit of "
            "20 parameters. Use Kronecker() for it, or Full(limit=...) if that is meant.",
            lambda: kfac(structure=natgrad.Full(limit=20)),
        )

    def test_sharing(self):
        says(
            SettingError,
            "Kronecker.sharing is 'both' but must be 'expand', 'reduce' or 'traces'; leave it out "
            "for 'expand'.",
            lambda: natgrad.Kronecker(sharing="both"),
        )

    @pytest.mark.parametrize("structure", [natgrad.Kronecker(), natgrad.EKFAC()], ids=str)
    def test_factors_of_a_norm_layer(self, structure):
        says(
            CoverageError,
            "Kronecker factors need an input shared by all output units, which LayerNorm '0' does "
            "not have. Use UnitWise() for it.",
            lambda: kfac(nn.Sequential(nn.LayerNorm(3)), structure=lambda layer: structure),
        )


class TestCapture:
    def test_the_model_was_not_called(self):
        model = MLP.model()
        it = kfac(model, **often())
        x, _ = MLP.batch()
        weights = dict(model.named_parameters())
        hidden = F.linear(x, weights["0.weight"], weights["0.bias"])
        hidden.sum().backward()
        says(
            CaptureError,
            "There are gradients at step 0 but no statistics, as no layer that KFAC watches was "
            "called: call the model that KFAC was given, and do not compile a function around it.",
            it.step,
        )

    def test_no_gradients_at_all_is_no_mistake(self):
        it = kfac(**often())
        it.step()
        assert it.steps == 1

    def test_only_a_graph_was_built(self):
        model = MLP.model()
        it = kfac(model, **often())
        x, y = MLP.batch()
        with pytest.warns(UserWarning, match="create_graph"):  # torch's, of the cycle it makes
            F.cross_entropy(model(x), y).backward(create_graph=True)
        says(
            CaptureError,
            "There are gradients at step 0 but no statistics, as the backward pass ran with "
            "create_graph=True: take that away on this step.",
            it.step,
        )
        model.zero_grad()

    def test_no_output_was_observed(self):
        model = MLP.model()
        it = kfac(model, curvature=natgrad.ExactFisher(), **often())
        x, y = MLP.batch()
        for part in model:  # what the model itself returns is seen without a word
            x = part(x)
        F.cross_entropy(x, y).backward()
        says(
            CaptureError,
            f"There are gradients at step 0 but no statistics, as {natgrad.ExactFisher()!r} saw no "
            "output: call kfac.observe(output) before backward().",
            it.step,
        )

    def test_observed_without_a_call(self):
        it = kfac(curvature=natgrad.ExactFisher(), **often())
        says(
            CaptureError,
            "observe() was called but no layer of the model was, since the last step: call the "
            "model that KFAC was given first (a checkpointed one with use_reentrant=False).",
            lambda: it.observe(torch.zeros(2, 3, requires_grad=True)),
        )

    def test_a_sum_over_an_unknown_number(self):
        model = NETS["mlp"].model()
        it = kfac(model, loss=natgrad.SumLoss(), **often(update_every=2))
        x, y = MLP.batch()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        it.step()
        model.zero_grad()
        F.cross_entropy(model[4](model[:4](x)), y, reduction="sum").backward()
        says(
            CaptureError,
            "SumLoss() needs the number of samples, but the model itself was not called since the "
            "last step. Call the model KFAC was given, or pass step(samples=...).",
            it.step,
        )
        it.step(samples=16)


class TestKinds:
    def test_they_are_the_builtin_ones_too(self):
        assert issubclass(SettingError, ValueError)
        assert issubclass(CoverageError, ValueError)
        assert issubclass(CaptureError, RuntimeError)
        assert issubclass(natgrad.errors.CheckpointError, ValueError)
        for error in (SettingError, CoverageError, CaptureError, natgrad.errors.CheckpointError):
            assert issubclass(error, natgrad.NatgradError)
