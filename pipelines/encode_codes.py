"""Run stage 3: add the codes of the configured codecs to a dataset.

python pipelines/encode_codes.py CONFIG [KEY=VALUE...]

The exit status is 0 if the stage is done, 1 if something failed, and 2 if the configuration is wrong.
"""

from recipe import exit_with, run_stage

if __name__ == "__main__":
    exit_with(run_stage, "encode")
