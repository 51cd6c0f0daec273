"""A comparison of optimizers on one model and one data set: what it runs, what it records, and what it makes of the records.

study (what is compared), planning (which runs are left), training (one run in a process of its own), records (what is kept of it),
existing (runs that were made elsewhere), analysis (the table's numbers), presentation, plots and report (what is shown).
"""
