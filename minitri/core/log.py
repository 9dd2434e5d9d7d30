"""The logger of all of minitri, which programs show on standard error."""

import logging

log = logging.getLogger("minitri")
