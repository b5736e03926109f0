"""Stand-in for `torchvision._meta_registrations`, for SGLang server processes on a machine without a GPU.

What it stands in for: SGLang imports torchvision by name. The torchvision wheel on PyPI is built against CUDA torch, so
beside CPU torch its compiled part does not load, and `_meta_registrations` (shape rules for those compiled operators)
fails at import. An empty module in its place lets the pure Python part of torchvision load; text models call nothing else.

When it can go: as soon as SGLang no longer imports torchvision for text models, or a CPU build of torchvision is
installed beside CPU torch.

This folder is no package of ours: it is put in front of PYTHONPATH of CPU server processes only, where Python imports
`sitecustomize` by itself at start. It is never used on a GPU.
"""

import sys
import types

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
