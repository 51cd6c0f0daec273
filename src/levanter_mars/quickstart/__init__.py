"""What `make train` needs around Levanter's own training command: a corpus, an identity for the run, and a report on it."""
