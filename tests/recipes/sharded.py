"""Runs a recipe sharded (FSDP2) over the processes of a CPU: torchrun ... sharded.py RECIPE FLAGS

Accelerate shards only where it sees GPUs, and runs DDP elsewhere without a word. PyTorch can do it with gloo as well, so
here Accelerate is told that it sees some.
"""

import runpy
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
