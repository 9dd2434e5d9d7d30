"""How the retrieval policy scores chunks of the full cache."""

import pytest
import torch

from minitri.caches.policies import NEIGHBOR
from tests.cascades import Rig, random_prompt
from tests.conftest import tiny_config, tiny_model


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_the_queries_that_choose_are_those_that_attend(monkeypatch, chunk_size):
    """Rotated at their positions, as the keys are. The chunks held after a prompt are the best by
    the queries that attention itself was given for its last token; by queries that are not rotated
    others would be."""
    config = tiny_config()
    target, seen = tiny_model(config), []
    attend = target.attend
    monkeypatch.setattr(
        target, "attend", lambda q_BTHD, *rest: seen.append(q_BTHD) or attend(q_BTHD, *rest)
    )
    sizes = {"num_sink_tokens": 1, "num_recent_tokens": 1, "observation_window": 1}
    sizes |= {"budget": 48, "chunk_size": chunk_size}
    rig = Rig(target, [random_prompt(config, 201)], method="retrieval", **sizes)
    with torch.inference_mode():
        rig.start()
    M, known, rope = chunk_size, 200, target.rope.at(torch.tensor([[-200]]))
    num_others = 0
    for layer, q_BTHD in enumerate(seen[-config.num_layers :]):
        keys_KSD = rig.full.keys[layer, 0, :, : known + 1]
        means_KND = keys_KSD[:, :known].unflatten(1, (known // M, M)).mean(2)
        best = []
        for asking in (q_BTHD, rope.rotate(q_BTHD)):  # back to where they were before rotation
            q_KGD = asking[0, 0].unflatten(0, (config.num_kv_heads, -1))
            best.append(best_chunks(q_KGD, means_KND, 48 // M))
        small_KSD = rig.small.keys[layer, 0, :, :48]
        equal_KCS = (small_KSD.unsqueeze(2) == keys_KSD.unsqueeze(1)).all(3)
        for k in range(config.num_kv_heads):
            held = {t // M for t in equal_KCS[k].any(0).nonzero().flatten().tolist()}
            # The last token of the prompt is over the least important slot.
            assert len(best[0][k] - held) <= (M == 1)
            assert held - {known // M} <= best[0][k]
            num_others += best[0][k] != best[1][k]
    assert num_others == config.num_layers * config.num_kv_heads


def best_chunks(q_KGD, means_KND, num_kept: int) -> list[set[int]]:
    """The numbers of the chunks to keep for each KV head: the first, the last and the best."""
    scores_KN = (q_KGD @ means_KND.transpose(1, 2) / q_KGD.shape[2] ** 0.5).softmax(-1).sum(1)
    scores_KN[:, 1:] = scores_KN[:, 1:].maximum(NEIGHBOR * scores_KN[:, :-1])
    scores_KN[:, [0, -1]] = 10.0
    return [set(row) for row in scores_KN.topk(num_kept).indices.tolist()]
