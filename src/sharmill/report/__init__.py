"""The page about a run or a dataset: one HTML file to look at and to listen to, made by ``sharmill report``."""
