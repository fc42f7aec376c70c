"""The models that `benchmarks.model_gallery` looks at: two sizes of each, and one batch.

A model of transformers is its configuration: the library's own defaults for the full size, which is
made on the meta device, and a few smaller numbers for the size that is trained. Models of timm and
PyTorch Geometric have one size, and are there where these libraries are installed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY, CLASSES = 4, 16, 99, 5
Inputs = dict[str, Any]


@dataclass(frozen=True)
class GalleryModel:
    """``build(full)`` makes the model, ``inputs()`` a batch for the small one, and ``loss`` is that
    of the model on a batch."""

    name: str
    library: str
    build: Callable[[bool], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[nn.Module, Inputs], Tensor]


def own_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    """Models of transformers compute their loss themselves, if they are given labels."""
    loss: Tensor = model(**inputs).loss
    return loss


def class_loss(model: nn.Module, inputs: Inputs) -> Tensor:
    return F.cross_entropy(model(inputs["x"]), inputs["labels"])


@dataclass(frozen=True)
class Configured:
    """A model of transformers by the names of its classes.

    Arguments:
        title: what the page calls it.
        config: name of the configuration's class.
        model: name of the model's class.
        small: what the small one has instead of the defaults.
        inputs: makes a batch.
        full: what the full one has instead of the defaults, where these are no usual size.
    """

    title: str
    config: str
    model: str
    small: dict[str, Any]
    inputs: Callable[[], Inputs]
    full: dict[str, Any] = field(default_factory=dict)

    def build(self, full: bool) -> nn.Module:
        import transformers

        config = getattr(transformers, self.config)(**(self.full if full else self.small))
        made: nn.Module = getattr(transformers, self.model)(config)
        return made

    def entry(self) -> GalleryModel:
        return GalleryModel(self.title, "transformers", self.build, self.inputs, own_loss)


def words(*, sequence: bool = True) -> Inputs:
    """Tokens `[4, 16]` with a label each, or one a sequence."""
    tokens = torch.randint(5, VOCABULARY, (BATCH, TOKENS))
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.clone() if sequence else torch.randint(2, (BATCH,)),
    }


def pair() -> Inputs:
    """What goes into an encoder, and what its decoder says."""
    tokens = torch.randint(5, VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": tokens, "labels": torch.randint(5, VOCABULARY, (BATCH, TOKENS // 2))}


def sound() -> Inputs:
    """Spectrograms `[4, 80, 60]` and what is said in them."""
    heard = torch.randn(BATCH, 80, 60)
    return {"input_features": heard, "labels": torch.randint(5, VOCABULARY, (BATCH, 8))}


def pictures() -> Inputs:
    return {
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "labels": torch.randint(CLASSES, (BATCH,)),
    }


def segmented() -> Inputs:
    """A class for each pixel."""
    images = torch.randn(BATCH, 3, 64, 64)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (BATCH, 64, 64))}


def captioned() -> Inputs:
    tokens = torch.randint(5, VOCABULARY - 1, (BATCH, TOKENS))
    tokens[:, -1] = VOCABULARY - 1  # the end, where a caption is read off
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "return_loss": True,
    }


def _encoder(**more: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **sizes, **more}


def _decoder(**more: Any) -> dict[str, Any]:
    return _encoder(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def _both(**more: Any) -> dict[str, Any]:
    layers = {f"{side}_layers": 2 for side in ("encoder", "decoder")}
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    wide = {f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {"vocab_size": VOCABULARY, "d_model": 64, **layers, **heads, **wide, **special, **more}


def _images(**more: Any) -> dict[str, Any]:
    labels = {str(i): i for i in range(CLASSES)}
    return {"image_size": 32, "num_labels": CLASSES, "label2id": labels, **more}


def _vision(**more: Any) -> dict[str, Any]:
    sizes = _encoder(patch_size=8, **more)
    return _images(**{k: v for k, v in sizes.items() if not k.startswith(("vocab", "max"))})


def _clip() -> dict[str, Any]:
    text = _encoder(projection_dim=32, bos_token_id=1, eos_token_id=VOCABULARY - 1)
    vision = _encoder(projection_dim=32, image_size=32, patch_size=8)
    vision = {k: v for k, v in vision.items() if not k.startswith(("vocab", "max"))}
    return {"text_config": text, "vision_config": vision, "projection_dim": 32}


_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
_GPT2 = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4}
_T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}
_WHISPER = _both(max_source_positions=30, max_target_positions=64, suppress_tokens=None)
_SWIN = {"embed_dim": 32, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4, "patch_size": 2}
_SEGFORMER = {
    "hidden_sizes": (16, 32, 64, 64),
    "depths": (1, 1, 1, 1),
    "num_attention_heads": (1, 2, 4, 4),
    "decoder_hidden_size": 64,
    "num_labels": CLASSES,
}


def _phrases() -> Inputs:
    return words(sequence=False)


TRANSFORMERS: tuple[Configured, ...] = (
    Configured("BERT", "BertConfig", "BertForMaskedLM", _encoder(), words),
    Configured(
        "RoBERTa", "RobertaConfig", "RobertaForSequenceClassification", _encoder(), _phrases
    ),
    Configured(
        "DistilBERT",
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
        _phrases,
    ),
    Configured("ALBERT", "AlbertConfig", "AlbertForMaskedLM", _encoder(embedding_size=32), words),
    Configured(
        "DeBERTa-v2",
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        _encoder(relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
        _phrases,
        {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 256},
    ),
    Configured(
        "ELECTRA",
        "ElectraConfig",
        "ElectraForSequenceClassification",
        _encoder(embedding_size=32),
        _phrases,
    ),
    Configured("GPT-2", "GPT2Config", "GPT2LMHeadModel", _GPT2, words),
    Configured("GPT-NeoX", "GPTNeoXConfig", "GPTNeoXForCausalLM", _encoder(), words),
    Configured(
        "OPT",
        "OPTConfig",
        "OPTForCausalLM",
        _encoder(ffn_dim=128, word_embed_proj_dim=64),
        words,
    ),
    Configured(
        "BLOOM",
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4},
        words,
        {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
    ),
    Configured("Llama", "LlamaConfig", "LlamaForCausalLM", _decoder(), words),
    Configured("Mistral", "MistralConfig", "MistralForCausalLM", _decoder(), words),
    Configured("Qwen2", "Qwen2Config", "Qwen2ForCausalLM", _decoder(), words),
    Configured("Gemma", "GemmaConfig", "GemmaForCausalLM", _decoder(head_dim=16), words),
    Configured("Phi", "PhiConfig", "PhiForCausalLM", _decoder(), words),
    Configured("Mixtral", "MixtralConfig", "MixtralForCausalLM", _decoder(**_EXPERTS), words),
    Configured("Qwen3-MoE", "Qwen3MoeConfig", "Qwen3MoeForCausalLM", _decoder(**_QWEN), words),
    Configured(
        "GPT-OSS", "GptOssConfig", "GptOssForCausalLM", _decoder(**_EXPERTS, head_dim=16), words
    ),
    Configured(
        "Mamba",
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
        words,
    ),
    Configured("T5", "T5Config", "T5ForConditionalGeneration", {**_T5, "num_layers": 2}, pair),
    Configured("BART", "BartConfig", "BartForConditionalGeneration", _both(), pair),
    Configured("Whisper", "WhisperConfig", "WhisperForConditionalGeneration", _WHISPER, sound),
    Configured("ViT", "ViTConfig", "ViTForImageClassification", _vision(), pictures),
    Configured("DINOv2", "Dinov2Config", "Dinov2ForImageClassification", _vision(), pictures),
    Configured("Swin", "SwinConfig", "SwinForImageClassification", _images(**_SWIN), pictures),
    Configured(
        "ConvNeXt",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        _images(hidden_sizes=(16, 32), depths=(1, 1), num_stages=2),
        pictures,
    ),
    Configured("CLIP", "CLIPConfig", "CLIPModel", _clip(), captioned),
    Configured(
        "SegFormer",
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        _SEGFORMER,
        segmented,
    ),
)

TIMM = (
    "resnet50",
    "nf_resnet26",
    "resnetv2_50x1_bit",
    "convnext_tiny",
    "vit_tiny_patch16_224",
    "mobilenetv3_small_100",
    "efficientnet_b0",
    "regnety_002",
    "mixer_s32_224",
)


def _timm(name: str) -> GalleryModel:
    size = 224 if name.endswith("_224") else 64

    def build(full: bool) -> nn.Module:
        from natgrad.lab.models.vision import torchvision

        torchvision()
        import timm  # type: ignore[import-not-found, unused-ignore]

        made: nn.Module = timm.create_model(name, num_classes=1000 if full else CLASSES)
        return made

    def inputs() -> Inputs:
        images = torch.randn(BATCH, 3, size, size)
        return {"x": images, "labels": torch.randint(CLASSES, (BATCH,))}

    return GalleryModel(name, "timm", build, inputs, class_loss)


class _Graphs(nn.Module):
    """Two layers of graph convolutions, and a class for each node."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        from torch_geometric import nn as layers  # type: ignore[import-not-found, unused-ignore]

        make = getattr(layers, kind)
        self.first, self.second = make(16, 32), make(32, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.second(F.relu(self.first(x, edges)), edges)
        return out


def _graph(kind: str) -> GalleryModel:
    def inputs() -> Inputs:
        edges = torch.randint(40, (2, 160))
        return {"x": torch.randn(40, 16), "edges": edges, "labels": torch.randint(CLASSES, (40,))}

    def loss(model: nn.Module, batch: Inputs) -> Tensor:
        return F.cross_entropy(model(batch["x"], batch["edges"]), batch["labels"])

    return GalleryModel(kind, "torch_geometric", lambda full: _Graphs(kind), inputs, loss)


def gallery() -> Iterator[GalleryModel]:
    """All that can be made here."""
    if find_spec("transformers") is not None:
        yield from (one.entry() for one in TRANSFORMERS)
    if find_spec("timm") is not None and find_spec("torchvision") is not None:
        yield from map(_timm, TIMM)
    if find_spec("torch_geometric") is not None:
        yield from map(_graph, ("GCNConv", "SAGEConv", "GATConv"))
