"""Payment: how weights are made from logits."""

from hf_fullpay.payment.clamp import Clamp
from hf_fullpay.payment.mixture import Mixture
from hf_fullpay.payment.softmax import Softmax

Payment = Softmax | Mixture | Clamp
__all__ = ["Clamp", "Mixture", "Payment", "Softmax"]
