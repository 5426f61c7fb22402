"""Run an unchanged NeMo training script with sharmill's additions to NeMo's data and models.

torchrun --nproc_per_node=8 jobs/nemo_script.py NeMo/examples/speechlm2/salm_train.py \
    --config-path=$PWD/configs/training --config-name=salm [key=value ...]

The arguments after the script are passed to it. Its data may use `type: sharmill`. With the extra `speechlm2`, it may
also use `resumable: true` in `data.train_ds` and, for a SALM, `tensor_parallel_size` in `trainer.strategy`.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import sharmill.training.nemo.input_type

if find_spec("peft"):
    # NeMo's speechlm2 models cannot be imported without peft.
    import sharmill.training.nemo.datamodule
    import sharmill.training.nemo.tensor_parallel  # noqa: F401

if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        print("Error: name a NeMo training script, such as NeMo/examples/speechlm2/salm_train.py", file=sys.stderr)
        sys.exit(2)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
