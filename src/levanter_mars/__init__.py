"""MARS optimizers for Levanter: variance reduction for AdamW, Lion, Shampoo and Muon, by named axes, as its authors published it."""

from levanter_mars.compatibility import explained

with explained():
    from levanter_mars.configs import MarsAdamWConfig, MarsLionConfig, MarsMConfig, MarsShampooConfig
    from levanter_mars.diagnostics import diagnostics
    from levanter_mars.optimizers import mars_adamw, mars_lion, mars_m, mars_shampoo
    from levanter_mars.parameters import AxisRoles, matrix, vector

__all__ = [
    "AxisRoles",
    "MarsAdamWConfig",
    "MarsLionConfig",
    "MarsMConfig",
    "MarsShampooConfig",
    "diagnostics",
    "mars_adamw",
    "mars_lion",
    "mars_m",
    "mars_shampoo",
    "matrix",
    "vector",
]
