"""Submit stages to SLURM, or run them here, like `sharmill submit`.

python jobs/submit.py stage1|stage2|stage3|prepare|validate|all CONFIG... --cluster slurm --profile PROFILE
"""

import sys

from sharmill.cli.main import main

if __name__ == "__main__":
    main(["submit", *sys.argv[1:]])
