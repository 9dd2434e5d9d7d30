"""Logits that are not finite end a run with one line that names the models."""

import pytest
import torch

from minitri import InputError
from tests.cascades import WARM, settings_of, tiny_engine


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    ("method", "tree", "damaged"),
    [
        ("autoregressive", "", "model"),
        ("retrieval", "", "model"),
        ("triforce", "", "model"),
        ("retrieval", "4", "model"),
        ("naive", "", "draft"),
        ("triforce", "", "draft"),
        ("naive", "4", "draft"),
    ],
)
def test_a_damaged_model_stops_the_run_and_is_named(method, tree, damaged, coupled):
    engine = tiny_engine()
    model = engine.models.draft if damaged == "draft" else engine.model
    model.norm.weight[-1] = torch.nan
    object.__setattr__(model.config, "name", "the-damaged-one")
    sizes = {"budget": 32, "num_recent_tokens": 20, "tree": tree, "coupled": coupled}
    with pytest.raises(InputError, match="the-damaged-one .*computed logits") as error:
        engine.complete([5, 6, 7], **settings_of(method, sampling=WARM, **sizes))
    assert "dtype=float32" in str(error.value)
    assert " or " not in str(error.value).split(" computed")[0]
