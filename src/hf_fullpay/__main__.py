"""python -m hf_fullpay: the command line."""

import sys

from hf_fullpay.hf.cli import main

sys.exit(main())
