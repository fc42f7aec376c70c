"""The one line where transformers and peft fine-tune: coverage, the loss that is found, and that
recomputing activations changes nothing."""

import pytest
import torch

import natgrad
from natgrad.errors import CoverageError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    # Of the frameworks themselves, and of what they call.
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("error::UserWarning:natgrad"),
]
SAMPLES, LENGTH = 4, 9
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def llama(**settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes, **heads, **settings))


def fine_tuned(model, folder, **arguments):
    """Three steps of a Trainer; returns the KFAC."""
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(20, (3 * SAMPLES, LENGTH), generator=generator)
    torch.manual_seed(2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    kfac = natgrad.KFAC(model, optimizer).attach()
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    given = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=SAMPLES,
        **quiet,
        **arguments,
    )
    data = [{"input_ids": t, "labels": t} for t in tokens]
    Trainer(model, given, train_dataset=data, optimizers=(optimizer, None)).train()
    return kfac


def loss_row(kfac):
    return next(row for row in kfac.health().rows if row[0] == "loss")[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["whole", "LoRA"])
def test_recomputed_activations_are_counted_once(tmp_path, reentrant, adapter):
    found = []
    recompute = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }
    for arguments in ({}, recompute):
        model = llama()
        if adapter is not None:
            model = peft.get_peft_model(model, peft.LoraConfig(**adapter))
        kfac = fine_tuned(model, tmp_path, **arguments)
        assert loss_row(kfac) == f"found: a mean over {SAMPLES * (LENGTH - 1)} terms"
        found.append([p.detach() for p in model.parameters() if p.requires_grad])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_tied_head_is_one_block_with_its_embedding(tmp_path):
    kfac = fine_tuned(llama(tie_word_embeddings=True), tmp_path)
    assert "(100.0%)" in kfac.coverage().footer
    assert all(block.ready for block in kfac.blocks)
    assert len(kfac.blocks) == 20  # seven matrices and two norms a layer, a norm, the embedding


def test_smoothed_labels_whose_loss_the_trainer_computes(tmp_path):
    kfac = fine_tuned(llama(), tmp_path, label_smoothing_factor=0.1)
    assert loss_row(kfac) == f"found: a mean over {SAMPLES * (LENGTH - 1)} terms"


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        (lambda: peft.LoraConfig(**LORA), 8),
        (lambda: peft.LoraConfig(**LORA, modules_to_save=["lm_head"]), 9),
        (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4), 1),
    ],
    ids=["LoRA", "a head beside it", "prompts"],
)
def test_adapters_are_covered_and_what_is_frozen_is_left_to_nobody(tmp_path, config, blocks):
    model = peft.get_peft_model(llama(), config())
    before = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    kfac = fine_tuned(model, tmp_path)
    table = kfac.coverage()
    assert "(100.0%)" in table.footer
    assert sum(block.ready for block in kfac.blocks) == len(kfac.blocks) == blocks
    states = {row[0]: row[-1] for row in table.rows}
    for name, value in before.items():
        assert states[name] == "frozen"
        assert torch.equal(model.get_parameter(name), value)


def test_vectors_alone_are_refused_in_a_sentence_without_the_frozen_names():
    config = peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["k_proj", "v_proj", "down_proj"],
        feedforward_modules=["down_proj"],
    )
    with pytest.raises(CoverageError, match=r"ParameterDict: .*; 21 other parameters are") as said:
        natgrad.KFAC(peft.get_peft_model(llama(), config), kl_clip=None)
    assert "lm_head" not in str(said.value)
