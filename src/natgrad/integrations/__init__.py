"""K-FAC inside other libraries' training loops; each file needs its library, none the others."""

from typing import TYPE_CHECKING

from natgrad.lazy import lazily

if TYPE_CHECKING:
    from natgrad.integrations import deepspeed, lightning, transformers
else:
    __getattr__, __dir__ = lazily(__name__, modules=("deepspeed", "lightning", "transformers"))

__all__ = ["deepspeed", "lightning", "transformers"]
