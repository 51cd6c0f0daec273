"""Token files that MARS users have already, as a component of Levanter's `data`: `type: bin`."""
