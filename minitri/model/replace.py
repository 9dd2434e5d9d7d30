"""Other modules in a model, made from those that it has: for kernels, or for fewer bits."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from minitri.model.llama import Llama

Factories = Mapping[type[nn.Module], Callable[[Any], nn.Module]]
"""By exact type of a module: what makes another one of it."""

Module = TypeVar("Module", bound=nn.Module)


def replace_modules(model: nn.Module, factories: Factories) -> None:
    """Puts what the factory of its type makes in the place of every module inside a model.

    Inner modules come first: a factory finds those that were made of them. One module after the
    other is replaced, so a factory that takes weights away has at most one of them in memory twice.
    """
    for name, child in list(model.named_children()):
        replace_modules(child, factories)
        if type(child) in factories:
            setattr(model, name, factories[type(child)](child))


def shared_copy(module: Module) -> Module:
    """Modules of their own over the very same weights."""
    twin = copy.copy(module)
    twin._modules = {
        name: None if child is None else shared_copy(child)
        for name, child in module._modules.items()
    }
    return twin


def copy_with(model: Llama, factories: Factories) -> Llama:
    """A copy of a model with other modules, which shares its embeddings and all else with it.

    Its `num_bytes` are those that it does not share.
    """
    twin, shared = shared_copy(model), {id(weight) for weight in model.parameters()}
    replace_modules(twin, factories)
    twin.lent_embedding = model.embed
    twin.num_bytes = sum(w.nbytes for w in twin.parameters() if id(w) not in shared)
    return twin
