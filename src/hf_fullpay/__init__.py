"""hf-fullpay: change how a Transformers model pays attention, by name.

    import hf_fullpay
    model = AutoModel.from_pretrained(path, attn_implementation="fullpay")

Importing registers every preset of `PRESETS` with Transformers.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hf_fullpay.attend import attention
from hf_fullpay.backends import BACKENDS, backend
from hf_fullpay.core.warning import FullPayWarning
from hf_fullpay.hf.convert import convert, revert
from hf_fullpay.hf.forecaster import FullPayForecaster, FullPayForecasterConfig, register_forecaster
from hf_fullpay.hf.models import *  # noqa: F403
from hf_fullpay.hf.models import CONFIGS, MODELS, register_models
from hf_fullpay.hf.register import register, register_presets
from hf_fullpay.hf.sliding import sliding_cache
from hf_fullpay.payment import Clamp, Mixture, Softmax
from hf_fullpay.plan import PRESETS, AttentionPlan
from hf_fullpay.reach import Band, Blocks, Chunks, Full, WindowGlobal, Windows
from hf_fullpay.scores import Bounded, DelayBias, DynamicScale, Plain

if TYPE_CHECKING:
    from hf_fullpay.diagnosis import Report, Settings, calibrate, compare, diagnose, sensitivity, suggest
    from hf_fullpay.diagnosis.promises import Promise, Promises, check
    from hf_fullpay.hf.callback import DiagnoseCallback

__all__ = [
    "BACKENDS",
    "PRESETS",
    "AttentionPlan",
    "Band",
    "Blocks",
    "Bounded",
    "Chunks",
    "Clamp",
    "DelayBias",
    "DiagnoseCallback",
    "DynamicScale",
    "Full",
    "FullPayForecaster",
    "FullPayForecasterConfig",
    "FullPayWarning",
    "Mixture",
    "Plain",
    "Report",
    "Settings",
    "Promise",
    "Promises",
    "Softmax",
    "WindowGlobal",
    "Windows",
    "attention",
    "backend",
    "calibrate",
    "compare",
    "check",
    "convert",
    "diagnose",
    "register",
    "revert",
    "sensitivity",
    "sliding_cache",
    "suggest",
    *CONFIGS,
    *MODELS,
]

__version__ = version("hf-fullpay")

register_presets()
register_models()
register_forecaster()


# Imported when used: a model that only runs needs no checks, and Trainer alone takes a second.
_WHEN_USED = {
    "hf_fullpay.diagnosis": ("Report", "Settings", "calibrate", "compare", "diagnose", "sensitivity", "suggest"),
    "hf_fullpay.diagnosis.promises": ("Promise", "Promises", "check"),
    "hf_fullpay.hf.callback": ("DiagnoseCallback",),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHEN_USED.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
