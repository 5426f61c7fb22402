"""Runs a training script of NeMo, as it is, with what sharmill adds to NeMo's data and models.

torchrun --nproc_per_node=8 jobs/nemo_script.py NeMo/examples/speechlm2/salm_train.py \
    --config-path=$PWD/configs/training --config-name=salm [key=value ...]

The arguments behind the script are its own. `type: sharmill` works in its data, and with the extra `speechlm2`
`resumable: true` in `data.train_ds`, and `tensor_parallel_size` in `trainer.strategy` of a SALM.
"""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import sharmill.training.nemo.input_type

if find_spec("peft"):
    # NeMo's models of this collection cannot be imported without it.
    import sharmill.training.nemo.datamodule
    import sharmill.training.nemo.tensor_parallel  # noqa: F401

if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        print("Error: name a training script of NeMo, such as NeMo/examples/speechlm2/salm_train.py", file=sys.stderr)
        sys.exit(2)
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
