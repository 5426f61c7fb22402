"""Run stage 1: find a context with the same voice for every utterance of a prepared manifest.

python pipelines/match_context.py CONFIG [KEY=VALUE...]

The exit status is 0 if the stage is done, 1 if something failed, and 2 if the configuration is wrong.
"""

from recipe import exit_with, run_stage

if __name__ == "__main__":
    exit_with(run_stage, "match")
