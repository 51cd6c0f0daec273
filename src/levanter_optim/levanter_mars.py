"""Installed as `levanter/optim/levanter_mars.py`: Levanter imports every module there before it parses an `optimizer:`, or a `data:`."""

import levanter_mars.configs
import levanter_mars.data.component  # noqa: F401
