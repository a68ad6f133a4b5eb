"""What the tests with Transformers share."""

import pytest
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import hf_fullpay
from hf_fullpay import plan as plan_module


@pytest.fixture
def own_name():
    """Register plans under names that are forgotten after the test, so that the table stays as it ships."""
    names = []

    def register(plan, name=None):
        names.append(name or f"of_this_test_{len(names)}")
        hf_fullpay.register(names[-1], plan)
        return names[-1]

    yield register
    for name in names:
        plan_module._presets.pop(name, None)
        for registry in (AttentionInterface, AttentionMaskInterface):
            registry._global_mapping.pop(name, None)
