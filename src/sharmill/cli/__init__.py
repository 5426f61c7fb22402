"""The command line: one module per command or group of commands, which converts options and calls one function."""
