#!/usr/bin/env bash
# Conda environment for a GPU cluster: Python 3.12, CUDA toolkit from the driver, SGLang, then this package.
#
#   bash build_conda.sh [ENVIRONMENT_NAME]
#
# Not measured on our side: it needs NVIDIA GPUs.
set -euo pipefail
name="${1:-slime}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
eval "$(conda shell.bash hook)"
conda create --yes --name "$name" python=3.12
conda activate "$name"
pip install "sglang[all]"
pip install -r "$root/requirements.txt"
pip install --no-deps -e "$root"
python -c "import sglang, torch; assert torch.cuda.is_available(), 'torch sees no GPU: check the driver'"
