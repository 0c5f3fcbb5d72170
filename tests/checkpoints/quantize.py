"""Quantises a checkpoint, and writes what the quantised weights are worth as a second one.

    quantize.py --format FORMAT [--block ROWS COLUMNS] IN OUT [--reference REF]

OUT has the names, dtypes and `quantization_config` of the tool that makes such checkpoints, with
all scales in a shard of their own. REF has the same values in float32. Both are whole checkpoint
folders. The codes are those of ml_dtypes, so nothing here shares code with the engine.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": E4M3, "U8": np.uint8}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}

# Columns that share an exponent in the microscaling formats.
GROUP = 32
INDEX = "model.safetensors.index.json"


def read_checkpoint(folder):
    """Every tensor of a checkpoint by name, sorted."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:end].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                values = data[end + first : end + last].view(DTYPES[entry["dtype"]])
                tensors[name] = values.reshape(entry["shape"])
    return dict(sorted(tensors.items()))


def write_shard(file, tensors):
    header, blobs, first = {}, [], 0
    for name, values in tensors.items():
        blobs.append(np.ascontiguousarray(values).tobytes())
        last = first + len(blobs[-1])
        shape = list(values.shape)
        offsets = [first, last]
        header[name] = {"dtype": NAMES[values.dtype], "shape": shape, "data_offsets": offsets}
        first = last
    header = json.dumps(header).encode()
    file.write_bytes(b"".join([len(header).to_bytes(8, "little"), header, *blobs]))


def write_checkpoint(folder, source, config, shards):
    """A folder with these shards, and everything else from `source`."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name not in [INDEX, "config.json"]:
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weight_map = {}
    for idx, tensors in enumerate(shards, 1):
        name = f"model-{idx:05}-of-{len(shards):05}.safetensors"
        write_shard(folder / name, tensors)
        weight_map.update(dict.fromkeys(tensors, name))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def tiles_of(weight, block):
    """The slices of the tiles, row by row."""
    (rows, columns), (n_out, n_in) = block, weight.shape
    for row in range(0, n_out, rows):
        for column in range(0, n_in, columns):
            yield np.s_[row : row + rows, column : column + columns]


def fp8(weight, block, suffix, shape):
    """E4M3 codes with an f32 scale a tile, the scales in `shape`; and the values."""
    codes, values = np.empty(weight.shape, E4M3), np.empty(weight.shape, np.float32)
    scales = []
    for tile in tiles_of(weight, block):
        scale = np.abs(weight[tile]).max() / np.float32(448) or np.float32(1)
        codes[tile] = (weight[tile] / scale).astype(E4M3)
        values[tile] = codes[tile].astype(np.float32) * scale
        scales.append(scale)
    return {"": codes, suffix: np.array(scales, np.float32).reshape(shape)}, values


def microscaled(weight, element, largest, largest_exponent):
    """Codes with an exponent for each group of columns, as bytes; and the values."""
    n_out, n_in = weight.shape
    exponents = np.empty((n_out, math.ceil(n_in / GROUP)), np.uint8)
    codes, values = np.empty(weight.shape, element), np.empty(weight.shape, np.float32)
    for group in range(exponents.shape[1]):
        tile = np.s_[:, group * GROUP : (group + 1) * GROUP]
        amax = np.maximum(np.abs(weight[tile]).max(axis=1), np.finfo(np.float32).tiny)
        exponent = np.floor(np.log2(amax)) - largest_exponent + 127
        exponents[:, group] = np.clip(exponent, 0, 254)
        scale = exponents[:, group].view(E8M0).astype(np.float32)[:, None]
        codes[tile] = np.clip(weight[tile] / scale, -largest, largest).astype(element)
        values[tile] = codes[tile].astype(np.float32) * scale
    return codes, exponents, values


def mxfp8(weight):
    codes, exponents, values = microscaled(weight, E4M3, 448, 8)
    return {"": codes, "_scale": exponents}, values


def mxfp4(weight):
    codes, exponents, values = microscaled(weight, E2M1, 6, 2)
    nibbles = codes.view(np.uint8) & 15
    return {"": nibbles[:, ::2] | nibbles[:, 1::2] << 4, "_scale": exponents}, values


def fp8_channel(weight):
    return fp8(weight, (1, weight.shape[1]), "_scale", (-1, 1))


def fp8_tensor(weight):
    return fp8(weight, weight.shape, "_scale", (1,))


def fp8_block(block):
    def quantized(weight):
        n_blocks = [math.ceil(n / size) for n, size in zip(weight.shape, block)]
        return fp8(weight, block, "_scale_inv", n_blocks)

    return quantized


def compressed_tensors(format, **weights):
    """How compressed-tensors describes a checkpoint of one format."""
    weights = {"type": "float", "symmetric": True, "dynamic": False} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def quark(exclude, layers=None):
    """How Quark describes a checkpoint in MXFP4, with other formats for some layers."""
    weight = {"dtype": "fp4", "qscheme": "per_group", "group_size": GROUP, "scale_format": "e8m0"}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight},
        "layer_quant_config": layers or {},
        "exclude": exclude,
    }


def recipe(arguments, n_layers):
    """The config, and what quantises the matrix of a projection (nothing: it stays as it is)."""
    mtp = f"model.layers.{n_layers}."
    is_attention, is_expert = lambda name: ".self_attn." in name, lambda name: ".experts." in name
    match arguments.format:
        case "fp8-block":
            # DeepSeek's leave out what lies around the MTP layer, and say it nowhere.
            keep = lambda name: name.endswith(("eh_proj.weight", "indexer.weights_proj.weight"))
            config = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": arguments.block,
                "modules_to_not_convert": [
                    f"model.layers.{layer}.self_attn.indexers_proj" for layer in range(n_layers + 1)
                ],
            }
            quantized = fp8_block(arguments.block)
            return config, lambda name: None if keep(name) else quantized
        case "fp8-channel":
            config = compressed_tensors("float-quantized", num_bits=8, strategy="channel")
            return config, lambda name: fp8_channel
        case "fp8-tensor":
            config = compressed_tensors("float-quantized", num_bits=8, strategy="tensor")
            return config, lambda name: fp8_tensor
        case "mxfp8":
            mx = {"num_bits": 8, "strategy": "group", "group_size": GROUP}
            return compressed_tensors("mxfp8-quantized", **mx), lambda name: mxfp8
        case "mxfp4":
            return quark(["lm_head", "*.mlp.gate"]), lambda name: mxfp4
        case "mxfp4-attn-fp8":
            layers = {"*self_attn*": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}}
            config = quark(["lm_head", "*.mlp.gate"], layers)
            return config, lambda name: fp8_channel if is_attention(name) else mxfp4
        case "mixed":
            # The MTP layer by a few of its leaves, as published lists have it.
            exclude = ["re:.*self_attn.*", f"{mtp}eh_proj", f"{mtp}mlp.experts.0.gate_proj"]
            main_expert = lambda name: is_expert(name) and not name.startswith(mtp)
            return quark(exclude), lambda name: mxfp4 if main_expert(name) else None


def is_projection(name, values):
    parts = (".self_attn.", ".mlp.", ".eh_proj.")
    return values.ndim == 2 and any(part in name for part in parts) and ".mlp.gate." not in name


def quantize(arguments):
    config = json.loads((arguments.source / "config.json").read_text())
    quantization, method = recipe(arguments, config["num_hidden_layers"])
    weights, scales, reference = {}, {}, {}
    for name, values in read_checkpoint(arguments.source).items():
        exact = values.astype(np.float32)
        quantized = method(name) if is_projection(name, values) else None
        parts, exact = quantized(exact) if quantized else ({"": values}, exact)
        if arguments.reference:
            reference[name] = exact
        for suffix, part in parts.items():
            (scales if suffix else weights)[name + suffix] = part
    names = list(weights)
    shards = [{name: weights[name] for name in names[half::2]} for half in range(2)]
    described = config | {"quantization_config": quantization}
    write_checkpoint(arguments.out, arguments.source, described, [*shards, scales])
    if arguments.reference:
        config["torch_dtype"] = "float32"
        write_checkpoint(arguments.reference, arguments.source, config, [reference])


FORMATS = "fp8-block fp8-channel fp8-tensor mxfp8 mxfp4 mxfp4-attn-fp8 mixed".split()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--block", type=int, nargs=2, default=[128, 128], help="of fp8-block")
    parser.add_argument("--reference", type=Path, metavar="REF", help="a folder to be made")
    parser.add_argument("source", type=Path, metavar="IN", help="a checkpoint in BF16 or F32")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder to be made")
    quantize(parser.parse_args())


if __name__ == "__main__":
    main()
