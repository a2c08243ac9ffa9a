"""GLM's correction bias against counts made by hand."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from lrmoe.training.balance import CorrectionBias
from lrmoe.training.presets import preset_config
from tests.train.test_presets import GLM_TINY

RATE = 0.01


@pytest.fixture
def model():
    config = preset_config("glm4-moe-small", {**GLM_TINY, "num_hidden_layers": 3})
    return AutoModelForCausalLM.from_config(config).train()


def routers(model):
    return [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]


class Loads:
    """Expert ids of every router call, by router, noted before anything is left out."""

    def __init__(self, model):
        self.ids = [[] for _ in routers(model)]
        for ids, router in zip(self.ids, routers(model), strict=True):
            router.register_forward_hook(lambda m, a, out, ids=ids: ids.append(out[2].clone()))


def expected_bias(ids, kept=None):
    every = torch.cat([i if kept is None else i[kept.reshape(-1).bool()] for i in ids])
    load = torch.bincount(every.reshape(-1), minlength=8).double()
    return RATE * torch.sign(load.mean() - load).float()


def ids_and_labels(seed=0):
    ids = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def test_all_micro_batches_count_once(model):
    bias, loads = CorrectionBias(model, RATE), Loads(model)
    for seed in range(3):
        model(**ids_and_labels(seed)).loss.backward()
    bias.update()
    assert len(routers(model)) == 2
    for router, ids in zip(routers(model), loads.ids, strict=True):
        assert len(ids) == 3
        assert torch.equal(router.e_score_correction_bias, expected_bias(ids))

    first = [r.e_score_correction_bias.clone() for r in routers(model)]
    for ids in loads.ids:
        ids.clear()
    model(**ids_and_labels(7))
    bias.update()
    for router, ids, before in zip(routers(model), loads.ids, first, strict=True):
        torch.testing.assert_close(router.e_score_correction_bias, before + expected_bias(ids))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_not_counted(model, use_reentrant):
    model.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    bias, loads = CorrectionBias(model, RATE), Loads(model)
    model(**ids_and_labels(0)).loss.backward()
    model(**ids_and_labels(1)).loss.backward()
    counted = [c.clone() for c in bias._counts]
    for ids, counts in zip(loads.ids, counted, strict=True):
        assert len(ids) == 4  # two forwards, two recomputations
        once = torch.cat([ids[0], ids[2]])
        assert torch.equal(counts, torch.bincount(once.reshape(-1), minlength=8))


def test_padding_is_not_counted(model):
    bias, loads = CorrectionBias(model, RATE), Loads(model)
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, 3:] = 0
    mask[1, :5] = 0
    model(**ids_and_labels(), attention_mask=mask)
    bias.update()
    for router, ids in zip(routers(model), loads.ids, strict=True):
        assert torch.equal(router.e_score_correction_bias, expected_bias(ids, mask))


def test_evaluation_is_not_counted(model):
    bias = CorrectionBias(model, RATE)
    model.eval()
    with torch.no_grad():
        model(**ids_and_labels())
    bias.update()
    for router in routers(model):
        assert not router.e_score_correction_bias.any()


def test_rate_zero_leaves_the_bias_alone(model):
    bias = CorrectionBias(model, 0)
    model(**ids_and_labels())
    bias.update()
    for router in routers(model):
        assert not router.e_score_correction_bias.any()


def test_the_bias_is_part_of_the_state(model):
    bias = CorrectionBias(model, RATE)
    model(**ids_and_labels())
    bias.update()
    saved = [v for k, v in model.state_dict().items() if k.endswith("e_score_correction_bias")]
    assert len(saved) == 2
    assert all(v.any() for v in saved)
