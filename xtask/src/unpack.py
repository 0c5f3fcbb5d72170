"""Unpacks what a build and a run need from wheels: unpack.py TARGET VERSION cpu|cuda WHEEL...

Every file's checksum is verified while it is read. Writes the version that torch-sys checks, and
last a manifest of sizes. A failure is one line.
"""
import os
import shutil
import sys
import zipfile
import zlib

CPU_LIBS = {"libtorch_cpu.so", "libtorch.so", "libc10.so", "libgomp.so.1"}
CUDA_LIBS = {"libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libc10_cuda.so"}
RUNTIME_LIBS = {"libcudart.so.13", "libcupti.so.13"}


def place(name, device):
    """Where a file of a wheel goes, below the target; None where it is not needed."""
    base = os.path.basename(name)
    if name.startswith("torch/include/"):
        return name[len("torch/"):]
    if name.startswith("torch/lib/") and base in CPU_LIBS:
        return "lib/" + base
    if base in RUNTIME_LIBS:
        return "lib/" + base
    is_cuda = name.startswith("torch/lib/") and base in CUDA_LIBS
    is_nvidia = name.startswith("nvidia/") and ".so" in base
    return "cuda/lib/" + base if device == "cuda" and (is_cuda or is_nvidia) else None


def unpack(wheel, target, device):
    """Unpacks one wheel; returns the size and the place of each file."""
    print("unpacking", os.path.basename(wheel), flush=True)
    placed = []
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            to = None if info.is_dir() else place(info.filename, device)
            if to is None:
                continue
            path = os.path.join(target, to)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with archive.open(info) as source, open(path, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            placed.append((info.file_size, to))
    return placed


def main():
    target, version, device, wheels = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
    placed = [entry for wheel in wheels for entry in unpack(wheel, target, device)]
    needed = {"lib/" + name for name in CPU_LIBS | RUNTIME_LIBS}
    if device == "cuda":
        needed |= {"cuda/lib/libtorch_cuda.so", "cuda/lib/libc10_cuda.so"}
    missing = sorted(needed - {to for _, to in placed})
    if missing:
        sys.exit("the wheels hold no " + ", ".join(missing))
    with open(os.path.join(target, "build-version"), "w") as out:
        out.write(version + "\n")
    with open(os.path.join(target, "manifest"), "w") as out:
        out.writelines(f"{size} {to}\n" for size, to in placed)


try:
    main()
except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
    sys.exit(str(error))
