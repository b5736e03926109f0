#!/usr/bin/env bash
# Conda environment for a GPU cluster: Python, the CUDA compiler, SGLang and its torch, then what is compiled against it.
#
#   bash build_conda.sh [ENVIRONMENT_NAME]
#
# Not measured on our side: it needs NVIDIA GPUs with a driver for CUDA 13. flash-attn and TransformerEngine are compiled
# here, which takes a while; MAX_JOBS limits the memory that this needs.
set -euo pipefail
# pins: begin
python_version=3.12
cuda_version=13.0.2
# pins: end
name="${1:-slime}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
eval "$(conda shell.bash hook)"
conda create --yes --name "$name" "python=$python_version"
conda activate "$name"
conda install --yes --channel "nvidia/label/cuda-$cuda_version" cuda-toolkit
pip install -r "$root/requirements.txt"
cudnn="$(python -c "import importlib.util as u; print(u.find_spec('nvidia.cudnn').submodule_search_locations[0])")"
MAX_JOBS="${MAX_JOBS:-8}" CUDA_HOME="$CONDA_PREFIX" CUDNN_PATH="$cudnn" \
    pip install --no-build-isolation -r "$root/requirements/gpu-build.txt"
pip install --no-deps -r "$root/requirements/gpu-nodeps.txt"
pip install --no-deps -e "$root"
python -c "import sglang, torch; assert torch.cuda.is_available(), 'torch sees no GPU: check the driver'"
