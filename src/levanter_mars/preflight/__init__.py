"""What a training run will need, found by compiling its train step for devices that are not there.

Imports the core and Levanter; nothing of the core imports this package.
"""
