"""Replaces modules of a network by others that compute the same in another way."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def replace_modules(
    module: nn.Module, factories: Mapping[type[nn.Module], Callable[[Any], nn.Module]]
) -> Any:
    """A copy of a module that shares its weights, where every module of exactly one of these types
    is what its factory makes of it.

    A factory is called with a module whose children have been replaced already.
    """
    twin = copy.copy(module)
    children = module.named_children()
    twin._modules = {name: replace_modules(child, factories) for name, child in children}
    make = factories.get(type(module))
    return twin if make is None else make(twin)
