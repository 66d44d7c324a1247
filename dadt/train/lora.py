"""Recognizes adapters whose weight is a product of two trained factors (LoRA), by the names that PEFT gives them."""

from __future__ import annotations

from collections.abc import Iterable

from dadt.train.attachment import Attachment
from dadt.train.frozen import readable

_FACTORS = {"lora_A": "A", "lora_B": "B", "lora_embedding_A": "A", "lora_embedding_B": "B"}


def trains_products(names: Iterable[str]) -> bool:
    """Return whether both factors of any LoRA adapter are among the parameters of these names."""
    found = dict[str, set[str]]()
    for name in names:
        parts = name.split(".")
        for place, part in enumerate(parts):
            if part in _FACTORS:
                found.setdefault(".".join(parts[:place]), set()).add(_FACTORS[part])
    return any(len(factors) > 1 for factors in found.values())


def tell(attachment: Attachment) -> None:
    """Warn the user if the optimizer trains a LoRA adapter, because averaging the factors does not average their
    products."""
    names = attachment.optimizers.parameter_names()
    if trains_products(names.get(id(p), "") for p in attachment.parameters):
        size = readable(sum(p.numel() for p in attachment.parameters))
        attachment.ranks.say(
            f"LoRA{attachment.name}: ranks that train apart average A and B each by itself, and the mean of A times"
            " that of B is not the mean of their products (exact only where one of both is frozen). --algorithm pipe"
            f" --compression int8 averages gradients, of {size} a step, and has no such error"
        )
