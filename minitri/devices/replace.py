"""Replaces modules of a network by others that compute the same function."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from minitri.core.model.llama import Llama

Factories = Mapping[type[nn.Module], Callable[[Any], nn.Module]]  # of replacements, by exact type


def replace_modules(module: nn.Module, factories: Factories) -> Any:
    """A copy of a module in which submodules are replaced by others with the same weights.
    A submodule whose exact type has a factory becomes the factory's result, children first."""
    twin = copy.copy(module)
    children = module.named_children()
    twin._modules = {name: replace_modules(child, factories) for name, child in children}
    make = factories.get(type(module))
    return make(twin) if make else twin


def copy_with(model: Llama, factories: Factories) -> Llama:
    """A copy of a model: a module whose type has a factory becomes the factory's result.
    Its `num_bytes` counts only weights that it does not share with the model."""
    twin: Llama = replace_modules(model, factories)
    twin.lent_embedding = model.embed
    shared = {id(weight) for weight in model.parameters()}
    twin.num_bytes = sum(w.nbytes for w in twin.parameters() if id(w) not in shared)
    return twin
