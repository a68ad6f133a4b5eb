"""How the kernels meet torch.compile: each public call is a break in the graph.

The compiler would look into the launches, whose tiles and options depend on the tensors, and an operator that it could
take as a whole must be registered under a name, which a kernel that loads under any name from the Hub cannot have. So
what stands before and after a call is compiled, and the call runs as it does without; `fullgraph=True` is refused by the
compiler, with this reason.
"""

from __future__ import annotations

import torch

uncompiled = torch.compiler.disable(reason="fullpay_kernels run outside compiled graphs; leave out fullgraph=True")
