"""python -m relaxlite"""

import sys

from relaxlite.cli import main

sys.exit(main())
