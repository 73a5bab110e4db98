"""Imports Hugging Face models as runs, exports runs, and moves adapters to and from PEFT's files."""

from zerojax.interop.huggingface.adapters import (
    adapter_base,
    adapter_frozen,
    adapter_lora,
    export_adapter,
    load_adapter,
)
from zerojax.interop.huggingface.exporting import (
    EXPORT_DTYPES,
    check_quantizable,
    export_model,
    plan_export,
    quantized_state,
)
from zerojax.interop.huggingface.families import FAMILIES
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.interop.huggingface.importing import (
    ModelReader,
    begin_run,
    check_template,
    import_model,
    run_settings,
    save_tokenizer,
)
from zerojax.interop.huggingface.load import load_base, load_weights
from zerojax.interop.huggingface.quantized import Direction, Format, WeightFormat
from zerojax.interop.huggingface.source import ModelFolder, is_model
from zerojax.interop.huggingface.weight_files import ExportFormat

__all__ = [
    "EXPORT_DTYPES",
    "FAMILIES",
    "Direction",
    "ExportFormat",
    "FP8Blocks",
    "Format",
    "ModelFolder",
    "ModelReader",
    "WeightFormat",
    "adapter_base",
    "adapter_frozen",
    "adapter_lora",
    "begin_run",
    "check_quantizable",
    "check_template",
    "export_adapter",
    "export_model",
    "import_model",
    "is_model",
    "load_adapter",
    "load_base",
    "load_weights",
    "plan_export",
    "quantized_state",
    "run_settings",
    "save_tokenizer",
]
