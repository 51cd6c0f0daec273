"""MARS optimizers for Levanter: variance reduction for AdamW, by named axes, as its authors published it."""

from levanter_mars.configs import MarsAdamWConfig
from levanter_mars.optimizers import mars_adamw
from levanter_mars.parameters import AxisRoles, matrix, vector

__all__ = ["AxisRoles", "MarsAdamWConfig", "mars_adamw", "matrix", "vector"]
