"""Lay out kernels/lowbit_kernels as a repository of the Kernel Hub: `python tools/kernel_package.py OUT`.

    OUT/README.md
    OUT/build/torch-cuda/   torch-rocm/   torch-cpu/      metadata.json, __init__.py and the sources, flat

The kernels are Triton and plain torch, so the variants hold the same files; each names its backend, and all
carry an id made from the sources, under which the Hub's loader imports the package (hence relative imports
only). `kernels upload OUT --repo-id OWNER/lowbit-kernels` publishes it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "kernels" / "lowbit_kernels"
BACKENDS = ("cuda", "rocm", "cpu")
README = """---
library_name: kernels
license: apache-2.0
---
# lowbit-kernels

Triton kernels for low-bit weights: quantize and pack, W4A16 GEMM.

```python
from kernels import get_kernel

k = get_kernel("OWNER/lowbit-kernels", version=1)
packed, scales, zeros = k.quantize_weight_int4_grouped(weight, group_size=128)
y = k.w4a16_gemm(x, packed, scales, zeros, group_size=128)
```
"""


def build(out: Path) -> Path:
    """Write the repository to `out` and return it; SystemExit if something is there."""
    if out.exists():
        raise SystemExit(f"{out}: exists; remove it first")
    files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".json"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:8]
    metadata = json.loads((PACKAGE / "metadata.json").read_text())
    out.mkdir(parents=True)
    (out / "README.md").write_text(README)
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__"))
        own = metadata | {"id": f"lowbit_kernels_{digest}", "backend": {"type": backend}}
        (variant / "metadata.json").write_text(json.dumps(own, indent=2) + "\n")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Lay out the kernels as a repository of the Kernel Hub.")
    parser.add_argument("out", type=Path, help="folder to create")
    print(build(parser.parse_args().out))
