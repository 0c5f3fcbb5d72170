//! `cargo xtask setup`: libtorch, from the wheel that pip finds, or the user's own.

use std::fs::{self, File};
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::libtorch::{self, Source, VERSION};
use crate::{process, serve, workspace};

pub(crate) const HELP: &str = "\
Downloads the PyTorch wheel through your own pip configuration and unpacks the few files that a
build and a run need into .libtorch (about 500 MB). A second run downloads nothing.

  --device cpu    the CPU libraries (default)
  --device cuda   also the CUDA libraries, in .libtorch/cuda (3.8 GB)
  --device rocm   the CPU libraries; HIP, hipRTC and hipBLAS are those of the machine
  --device auto   cuda or rocm where the kernel has the driver of such a GPU, else cpu

The program is the same for all of them. With cuda and rocm, setup names each library that a run
on the GPU lacks, with the way to get it, and fails; NVIDIA's driver may be missing where you only
build.

LIBTORCH=FOLDER or LIBTORCH_USE_PYTORCH=1 in the environment is checked and used instead. It may be
a ROCm build of PyTorch, whose HIP libraries are then found as well.";

const WAY_OUT: &str = "or set LIBTORCH to a folder with libtorch 2.11.0, \
                       or LIBTORCH_USE_PYTORCH=1 to use an installed PyTorch 2.11.0";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda,
    Rocm,
}

impl Device {
    fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
        }
    }
}

pub(crate) fn run(args: &[String]) -> Result<()> {
    let device = parse_device(args, device_of_machine())?;
    match libtorch::source_of_environment() {
        Source::PyTorch => check_pytorch()?,
        Source::Folder(folder) => check_folder(&folder)?,
        Source::Own if device == Device::Cuda => provide(Device::Cuda)?,
        Source::Own => provide(Device::Cpu)?,
    }
    if device == Device::Cpu { Ok(()) } else { check_libraries(device) }
}

/// What `auto` stands for.
fn device_of_machine() -> Device {
    let has = |file: &str| Path::new(file).exists();
    match (has("/proc/driver/nvidia/version"), has("/dev/kfd")) {
        (true, _) => Device::Cuda,
        (false, true) => Device::Rocm,
        (false, false) => Device::Cpu,
    }
}

/// What the program loads when it runs on a GPU.
fn check_libraries(device: Device) -> Result<()> {
    let program = serve::build(&["-p", "gpu-runtime", "--example", "libraries"])?;
    let mut check = Command::new(program);
    // Standard output belongs to the task that needed libtorch.
    check.arg(device.name()).envs(libtorch::loader_path()?).stdout(std::io::stderr());
    let status = check.status().context("start the check of the libraries")?;
    ensure!(
        status.success(),
        "what is built will run on the CPU; for --device {} get what is missing above",
        device.name()
    );
    Ok(())
}

/// What every task that builds on libtorch starts with.
pub(crate) fn ensure_libtorch() -> Result<()> {
    match libtorch::source_of_environment() {
        Source::Own if installed_bytes(&libtorch::folder(), Device::Cpu).is_some() => Ok(()),
        _ => run(&["--device".to_owned(), "cpu".to_owned()]),
    }
}

fn parse_device(args: &[String], auto: Device) -> Result<Device> {
    let text = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => "cpu",
        ["--device", device] => device,
        [arg] if arg.starts_with("--device=") => &arg["--device=".len()..],
        _ => bail!("setup takes --device cpu|cuda|rocm|auto, not `{}`", args.join(" ")),
    };
    match text {
        "cpu" => Ok(Device::Cpu),
        "cuda" => Ok(Device::Cuda),
        "rocm" => Ok(Device::Rocm),
        "auto" => Ok(auto),
        _ => bail!("--device is cpu, cuda, rocm or auto, not `{text}`"),
    }
}

fn check_pytorch() -> Result<()> {
    let version = process::python(&["-c", "import torch; print(torch.__version__)"]).context(
        "LIBTORCH_USE_PYTORCH is set, but python3 cannot import torch: install it or unset it",
    )?;
    let version = version.trim();
    check_version(version, "the PyTorch of python3")?;
    eprintln!("using PyTorch {version} of python3 (LIBTORCH_USE_PYTORCH is set)");
    show_loader_path()
}

fn check_folder(folder: &Path) -> Result<()> {
    let lib = folder.join("lib/libtorch_cpu.so");
    ensure!(
        lib.is_file(),
        "LIBTORCH is {}, which has no lib/libtorch_cpu.so: correct it, or unset it",
        folder.display()
    );
    if let Ok(version) = fs::read_to_string(folder.join("build-version")) {
        check_version(version.trim(), &folder.display().to_string())?;
    }
    eprintln!("using libtorch of {} (LIBTORCH is set)", folder.display());
    show_loader_path()
}

fn check_version(version: &str, whose: &str) -> Result<()> {
    let release = version.split('+').next().unwrap_or_default();
    ensure!(
        release == VERSION,
        "{whose} is {version}, but tch 0.24 needs {VERSION}: install that, or unset the variable"
    );
    Ok(())
}

/// What plain cargo needs where the run path in the programs does not lead to the libraries.
fn show_loader_path() -> Result<()> {
    if let Some((name, value)) = libtorch::loader_path()? {
        let lib = std::env::split_paths(&value).next().unwrap_or_default();
        eprintln!("without xtask, run what you build with {name}={}", lib.display());
    }
    Ok(())
}

fn provide(device: Device) -> Result<()> {
    let folder = libtorch::folder();
    if say_complete(&folder, device)? {
        return Ok(());
    }
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "setup knows the wheels for Linux on x86_64 only: install PyTorch {VERSION}, \
         then set LIBTORCH_USE_PYTORCH=1"
    );
    let _lock = lock(&workspace::root().join(".libtorch-lock"))?;
    // Another setup may have made it meanwhile.
    if say_complete(&folder, device)? {
        return Ok(());
    }
    check_python()?;
    check_space(device)?;
    let root = workspace::root();
    let (downloads, fresh) = (root.join(".libtorch-download"), root.join(".libtorch-new"));
    let wheels = download(&downloads, device)?;
    remove(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("make {}", fresh.display()))?;
    if let Err(error) = unpack(&fresh, device, &wheels) {
        // Neither half an unpacked set nor a damaged wheel may stay.
        remove(&fresh)?;
        remove(&downloads)?;
        return Err(error);
    }
    remove(&folder)?;
    fs::rename(&fresh, &folder).context("put .libtorch in place")?;
    remove(&downloads)?;
    let n_bytes = installed_bytes(&folder, device).context(".libtorch is not complete")?;
    eprintln!("libtorch {VERSION} is in .libtorch ({}, {} MB)", device.name(), n_bytes / 1_000_000);
    show_loader_path()
}

/// Keeps a second setup of the same files out until this one ends.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let reason = || format!("lock {}", path.display());
    let file = File::create(path).with_context(reason)?;
    if file.try_lock().is_err() {
        eprintln!("another setup is running: waiting for it");
        file.lock().with_context(reason)?;
    }
    Ok(file)
}

fn say_complete(folder: &Path, device: Device) -> Result<bool> {
    let Some(n_bytes) = installed_bytes(folder, device) else { return Ok(false) };
    let (name, n_mb) = (device.name(), n_bytes / 1_000_000);
    eprintln!("libtorch {VERSION} is in .libtorch ({name}, {n_mb} MB): nothing to do");
    show_loader_path()?;
    Ok(true)
}

/// Bytes of the files of the manifest, if each is there in its size, for this version and device.
fn installed_bytes(folder: &Path, device: Device) -> Option<u64> {
    let version = fs::read_to_string(folder.join("build-version")).ok()?;
    let manifest = fs::read_to_string(folder.join("manifest")).ok()?;
    let has_cuda = manifest.lines().any(|line| line.ends_with(" cuda/lib/libtorch_cuda.so"));
    if version.trim() != VERSION || device == Device::Cuda && !has_cuda {
        return None;
    }
    let mut total = 0;
    for line in manifest.lines() {
        let (size, path) = line.split_once(' ')?;
        let size: u64 = size.parse().ok()?;
        if fs::metadata(folder.join(path)).ok()?.len() != size {
            return None;
        }
        total += size;
    }
    Some(total)
}

fn check_python() -> Result<()> {
    let found = Command::new("python3").arg("--version").output();
    ensure!(
        found.is_ok_and(|output| output.status.success()),
        "python3 was not found: install Python 3 with pip, {WAY_OUT}"
    );
    process::python(&["-m", "pip", "--version"])
        .with_context(|| format!("python3 has no pip: install it (python3-pip), {WAY_OUT}"))?;
    Ok(())
}

fn check_space(device: Device) -> Result<()> {
    let print = "import shutil, sys; print(shutil.disk_usage(sys.argv[1]).free)";
    let root = workspace::root();
    let root = root.to_str().context("the workspace's path is not UTF-8")?;
    let free: u64 =
        process::python(&["-c", print, root])?.trim().parse().context("read the free space")?;
    let needed = match device {
        Device::Cuda => libtorch::CUDA_BYTES_NEEDED,
        _ => libtorch::CPU_BYTES_NEEDED,
    };
    ensure!(
        free >= needed,
        "libtorch needs {:.1} GB while it is unpacked, and the disk has {:.1} GB left: make room, \
         {WAY_OUT}",
        needed as f64 / 1e9,
        free as f64 / 1e9
    );
    Ok(())
}

/// Downloads into a folder of its own first, so that what lies in `downloads` is complete.
fn download(downloads: &Path, device: Device) -> Result<Vec<PathBuf>> {
    let complete = downloads.join(device.name());
    if !complete.is_dir() {
        let partial = downloads.join("partial");
        remove(&partial)?;
        fs::create_dir_all(&partial).with_context(|| format!("make {}", partial.display()))?;
        eprintln!("downloading {} with pip", libtorch::CPU_WHEELS.join(", "));
        pip_download(&partial, device)?;
        fs::rename(&partial, &complete).context("keep the wheels")?;
    }
    let files = fs::read_dir(&complete).context("list the wheels")?;
    let paths = files.map(|file| Ok(file?.path())).collect::<Result<Vec<_>>>()?;
    Ok(paths.into_iter().filter(|path| path.extension().is_some_and(|e| e == "whl")).collect())
}

fn pip_download(to: &Path, device: Device) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "--only-binary=:all:", "--dest"]).arg(to);
    if device != Device::Cuda {
        command.arg("--no-deps");
    }
    if !std::io::stderr().is_terminal() {
        command.arg("--progress-bar=off");
    }
    // On the disk whose free space was checked, not in a temporary folder that may be small.
    command.args(libtorch::CPU_WHEELS).env("TMPDIR", to);
    run_python(&mut command).map_err(|last| {
        anyhow!(
            "pip could not download torch {VERSION}: {last}: check the network and pip's \
             configuration and run again, {WAY_OUT}"
        )
    })
}

fn unpack(to: &Path, device: Device, wheels: &[PathBuf]) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-c", include_str!("unpack.py")]).arg(to).args([VERSION, device.name()]);
    run_python(command.args(wheels))
        .map_err(|last| anyhow!("the wheels could not be unpacked: {last}: run again, {WAY_OUT}"))
}

/// Runs a Python program that shows its progress; an error is the last line of what it says.
fn run_python(command: &mut Command) -> Result<(), String> {
    // Standard output belongs to the task that needed libtorch.
    command.stdin(Stdio::null()).stdout(std::io::stderr()).stderr(Stdio::piped());
    let output = command.spawn().and_then(std::process::Child::wait_with_output);
    let output = output.map_err(|error| format!("cannot start python3: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(process::last_line(&output.stderr)) }
}

pub(crate) fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", folder.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Device> {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        parse_device(&args, Device::Rocm)
    }

    #[test]
    fn devices_are_read_in_both_spellings() {
        assert_eq!(parse(&[]).unwrap(), Device::Cpu);
        assert_eq!(parse(&["--device", "cuda"]).unwrap(), Device::Cuda);
        assert_eq!(parse(&["--device=auto"]).unwrap(), Device::Rocm);
        assert!(parse(&["--device", "tpu"]).unwrap_err().to_string().contains("`tpu`"));
        assert!(parse(&["cpu"]).is_err());
    }

    #[test]
    fn another_release_is_refused_by_name() {
        assert!(check_version("2.11.0+cu130", "it").is_ok());
        let error = check_version("2.10.0", "the PyTorch of python3").unwrap_err().to_string();
        assert!(error.contains("2.10.0") && error.contains("needs 2.11.0"), "{error}");
    }
}
