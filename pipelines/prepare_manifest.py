"""Check the manifests of a dataset, and write one clean manifest and the rejects.

python pipelines/prepare_manifest.py CONFIG [KEY=VALUE...]

The exit status is 0 if the stage is done, 1 if something failed, and 2 if the configuration is wrong.
"""

from recipe import exit_with, run_stage

if __name__ == "__main__":
    exit_with(run_stage, "prepare")
