"""The command line: one module per command, which converts options and calls one function."""
