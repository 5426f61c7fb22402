"""Exports of a finished dataset to other formats, for trainers that do not read Shar. The registry lists them."""
