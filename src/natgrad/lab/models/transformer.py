"""A transformer without an embedding: pre-norm encoder layers, ``x <- x + f(norm(x))``."""

from torch import Tensor, nn


class Transformer(nn.Module):
    """A pre-norm encoder over tokens that are vectors already, classified by their mean; no
    dropout.

    Arguments:
        layers: number of encoder layers.
        width: of the tokens' vectors; the MLPs have four times as many hidden units.
        heads: of attention in each layer; must divide ``width``.
        classes: number of outputs.
    """

    def __init__(self, layers: int, width: int, heads: int, classes: int = 10) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, 4 * width, **options)  # type: ignore[arg-type]
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``[n, classes]``.

        Arguments:
            x: ``[n, tokens, width]``.
        """
        logits: Tensor = self.head(self.layers(x).mean(1))
        return logits
