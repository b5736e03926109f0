# Sourced by the other scripts: makes .venv with the laptop set (requirements/cpu*.txt) when it is missing or out of date.
# Sets PYTHON to the interpreter of the environment. SLIME_PYTHON chooses the interpreter that creates it.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# pins: begin
torchvision_version=0.28.0
# pins: end
VENV="${SLIME_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"

setup_venv() {
    local wanted stamp="$VENV/.requirements.sha256"
    wanted="$(cat "$ROOT"/requirements/cpu*.txt | sha256sum | cut -d' ' -f1)"
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return 0
    fi
    echo "Installing the laptop environment into $VENV (about 4 GB, two to three minutes) ..."
    "${SLIME_PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "error: Python 3.10 or newer is needed; set SLIME_PYTHON to one" >&2
        return 2
    }
    [ -x "$PYTHON" ] || "${SLIME_PYTHON:-python3}" -m venv "$VENV"
    "$PYTHON" -m pip install --quiet --upgrade pip
    "$PYTHON" -m pip install --quiet -r "$ROOT/requirements/cpu.txt"
    "$PYTHON" -m pip install --quiet --no-deps -r "$ROOT/requirements/cpu-nodeps.txt"
    # The servers need torchvision's name only; beside CPU torch it breaks other imports, so it gets a folder of its own.
    "$PYTHON" -m pip install --quiet --no-deps --upgrade --target "$VENV/sglang-only" "torchvision==$torchvision_version"
    echo "$wanted" >"$stamp"
}

# One thread per process: servers and trainer share the cores, and spinning OpenMP threads starve each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false RAY_USAGE_STATS_ENABLED=0
