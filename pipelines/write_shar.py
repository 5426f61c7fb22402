"""Run stage 2: write cuts, target audio and context audio as Shar shards.

python pipelines/write_shar.py CONFIG [KEY=VALUE...]

The exit status is 0 if the stage is done, 1 if something failed, and 2 if the configuration is wrong.
"""

from recipe import exit_with, run_stage

if __name__ == "__main__":
    exit_with(run_stage, "write")
