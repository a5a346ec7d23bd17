"""The slots of a vector environment: where their worlds are, and what becomes of a slot whose world is lost."""
