"""A GGUF file's weights as f16, in a second file: what peers read that should compute with the
numbers that minitri computes with."""

from pathlib import Path


def as_float16(path: Path) -> Path:
    """The GGUF file with its matrices as f16, written once next to it."""
    target = path.with_suffix(".f16.gguf")
    if target.exists():
        return target
    import numpy as np
    from gguf import (
        GGMLQuantizationType,
        GGUFReader,
        GGUFValueType,
        GGUFWriter,
        LlamaFileType,
        dequantize,
    )

    reader, partial = GGUFReader(path), target.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_F16)  # which OpenVINO needs
    for key, stored in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        element = stored.types[-1] if stored.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, stored.contents(), stored.types[0], sub_type=element)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        is_matrix = tensor.tensor_type != GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, values.astype(np.float16 if is_matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return partial.replace(target)
