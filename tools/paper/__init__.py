"""Tables and figures of the paper, and its baselines."""

from minitri.apps.cli.exits import import_pytorch

import_pytorch()  # set up as in the programs, before a module here imports it
