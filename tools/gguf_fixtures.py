"""Write the GGUF files under tests/data/gguf with the tools that the public uses.

Usage: python -m tools.gguf_fixtures AUTO_ROUND LLAMA_CPP

AUTO_ROUND is an unpacked auto-round wheel, whose `conversion` package is llama.cpp's
convert_hf_to_gguf; LLAMA_CPP is a folder with libllama, for its quantizer. None of our GGUF code
is used. How to get both is in tests/data/gguf/README.md.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from tests import gguf_twin

os.environ["NO_LOCAL_GGUF"] = "1"  # the converter takes the installed gguf package

CONVERTED = ("F32", "F16", "BF16", "Q8_0")  # what the converter writes by itself
FTYPES = {"Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18}  # llama.h's llama_ftype


class QuantizeParams(ctypes.Structure):
    """llama.h's llama_model_quantize_params in llama.cpp v0.5.0; the rest stays at its default."""

    _fields_ = [
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int32),
        ("output_tensor_type", ctypes.c_int32),
        ("token_embedding_type", ctypes.c_int32),
        ("rest", ctypes.c_uint8 * 240),
    ]


def quantizer(folder: Path) -> Any:
    """``quantize(source, target, ftype)`` of the libllama in this folder."""
    for pattern in ("libggml-base.*", "libggml.*", "libllama.*"):
        library = ctypes.CDLL(str(next(folder.glob(pattern))), mode=ctypes.RTLD_GLOBAL)
    # The struct is larger than two registers: by the ABI it is returned through, and here passed
    # by, memory. A larger buffer than the library's does no harm.
    library.llama_model_quantize_default_params.restype = QuantizeParams
    library.llama_backend_init()

    def quantize(source: Path, target: Path, ftype: int) -> None:
        params = library.llama_model_quantize_default_params()
        params.nthread, params.ftype = 1, ftype
        code = library.llama_model_quantize(
            str(source).encode(), str(target).encode(), ctypes.byref(params)
        )
        if code:
            raise SystemExit(f"llama_model_quantize gave {code} for {target.name}")

    return quantize


def converter(wheel: Path) -> Any:
    """``convert(directory, architecture, target, type)`` of the converter in this wheel."""
    # The package's own __init__ files import a quantization stack that is not needed here.
    for name in ("", ".utils"):
        module = types.ModuleType("auto_round" + name)
        module.__path__ = [str(wheel / module.__name__.replace(".", "/"))]
        sys.modules[module.__name__] = module
    import gguf

    # The converter names architectures that gguf 0.19 does not know yet; none of them is ours.
    gguf.MODEL_ARCH = types.SimpleNamespace(**gguf.MODEL_ARCH.__members__)
    for name in ("DFLASH", "EAGLE3"):
        gguf.MODEL_ARCH.__dict__.setdefault(name, None)
    # It loads its own parts as `conversion.*`, as in llama.cpp's tree.
    sys.path.insert(0, str(wheel / "auto_round/export/export_to_gguf"))
    conversion = importlib.import_module("conversion")

    def convert(directory: Path, architecture: str, target: Path, kind: str) -> None:
        made = conversion.get_model_class(architecture)
        made.set_vocab = lambda self: self._set_vocab_none()  # the models have no words
        made.no_mtp = True  # its --no-mtp; logits are the target's alone
        ftype = gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]
        made(directory, ftype, target).write()

    return convert


def main() -> None:
    wheel, library = map(Path, sys.argv[1:3])
    convert, quantize = converter(wheel), quantizer(library)
    gguf_twin.FILES.mkdir(parents=True, exist_ok=True)
    for family in gguf_twin.CONFIGS:
        for kind in (*CONVERTED, *FTYPES):
            config = gguf_twin.config(family, kind)
            target = gguf_twin.FILES / f"{family}-{kind}.gguf"
            with tempfile.TemporaryDirectory() as folder:
                directory = Path(folder) / "tiny"
                gguf_twin.write(directory, config, gguf_twin.originals(config))
                architecture = config["architectures"][0]
                if kind in CONVERTED:
                    convert(directory, architecture, target, kind)
                else:
                    whole = Path(folder) / "whole.gguf"
                    convert(directory, architecture, whole, "F32")
                    quantize(whole, target, FTYPES[kind])
            print(target.name, target.stat().st_size)


if __name__ == "__main__":
    main()
