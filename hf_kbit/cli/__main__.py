"""``python -m hf_kbit.cli``."""

import sys

from hf_kbit.cli import main

sys.exit(main())
