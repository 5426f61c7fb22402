"""Reading of datasets and other tools' Shars as lhotse cuts, in an order that can be resumed at any cut."""
