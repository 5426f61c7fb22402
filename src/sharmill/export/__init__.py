"""Exports: a finished dataset as other files, for trainers that do not read Shar. The forms are in the registry."""
