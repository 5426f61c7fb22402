"""A cluster in one process: simulated time, processes that switch at file operations, a seed that replays it."""
