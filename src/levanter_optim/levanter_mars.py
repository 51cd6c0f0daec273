"""Installed as `levanter/optim/levanter_mars.py`: Levanter imports every module there before it parses an `optimizer:`."""

import levanter_mars.configs  # noqa: F401
