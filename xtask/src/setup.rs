//! `cargo xtask setup`: libtorch, from the wheel that pip finds, or the user's own.

use std::fs;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::libtorch::{self, Source, VERSION};
use crate::{process, workspace};

pub(crate) const HELP: &str = "\
Downloads the PyTorch wheel through your own pip configuration and unpacks the few files that a
build and a run need into .libtorch (about 500 MB). A second run does nothing.

  --device cpu    the CPU libraries (default)
  --device cuda   also the CUDA libraries, in .libtorch/cuda (about 6 GB)
  --device rocm   your own ROCm PyTorch: install it, then set LIBTORCH_USE_PYTORCH=1
  --device auto   cuda where an NVIDIA driver is loaded, else cpu

LIBTORCH=FOLDER or LIBTORCH_USE_PYTORCH=1 in the environment is checked and used instead.";

const WAY_OUT: &str = "or set LIBTORCH to a folder with libtorch 2.11.0, \
                       or LIBTORCH_USE_PYTORCH=1 to use an installed PyTorch 2.11.0";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Device {
    Cpu,
    Cuda,
    Rocm,
}

pub(crate) fn run(args: &[String]) -> Result<()> {
    let device = parse_device(args, Path::new("/proc/driver/nvidia/version").exists())?;
    match libtorch::source_of_environment() {
        Source::PyTorch => check_pytorch(),
        Source::Folder(folder) => check_folder(&folder),
        Source::Own if device == Device::Rocm => bail!(
            "--device rocm uses your own PyTorch: install a ROCm build of PyTorch {VERSION}, \
             then set LIBTORCH_USE_PYTORCH=1"
        ),
        Source::Own => provide(device),
    }
}

/// What every task that builds on libtorch starts with.
pub(crate) fn ensure_libtorch() -> Result<()> {
    match libtorch::source_of_environment() {
        Source::Own if is_complete(&libtorch::folder(), Device::Cpu) => Ok(()),
        _ => run(&["--device".to_owned(), "cpu".to_owned()]),
    }
}

fn parse_device(args: &[String], has_nvidia_driver: bool) -> Result<Device> {
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
        "auto" if has_nvidia_driver => Ok(Device::Cuda),
        "auto" => Ok(Device::Cpu),
        _ => bail!("--device is cpu, cuda, rocm or auto, not `{text}`"),
    }
}

fn check_pytorch() -> Result<()> {
    let print = "import torch, os; print(torch.__version__); \
                 print(os.path.join(os.path.dirname(torch.__file__), 'lib'))";
    let found = python(&["-c", print]).context(
        "LIBTORCH_USE_PYTORCH is set, but python3 cannot import torch: install it or unset it",
    )?;
    let (version, lib) = found.trim().split_once('\n').context("python3 printed no version")?;
    check_version(version, "the PyTorch of python3")?;
    eprintln!("using PyTorch {version} of python3 (LIBTORCH_USE_PYTORCH)");
    eprintln!("to run what you build: export LD_LIBRARY_PATH={lib}");
    Ok(())
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
    eprintln!("using libtorch of {} (LIBTORCH)", folder.display());
    Ok(())
}

fn check_version(version: &str, whose: &str) -> Result<()> {
    let release = version.split('+').next().unwrap_or_default();
    ensure!(
        release == VERSION,
        "{whose} is {version}, but tch 0.24 needs {VERSION}: install that one, or unset the variable"
    );
    Ok(())
}

fn provide(device: Device) -> Result<()> {
    let folder = libtorch::folder();
    let name = if device == Device::Cuda { "cuda" } else { "cpu" };
    if is_complete(&folder, device) {
        eprintln!("libtorch {VERSION} is in .libtorch ({name}): nothing to do");
        return Ok(());
    }
    ensure!(
        cfg!(all(target_os = "linux", target_arch = "x86_64")),
        "setup knows the wheels for Linux on x86_64 only: install PyTorch {VERSION}, \
         then set LIBTORCH_USE_PYTORCH=1"
    );
    check_python()?;
    check_space(device)?;
    let downloads = workspace::root().join(".libtorch-download");
    let fresh = workspace::root().join(".libtorch-new");
    remove(&fresh)?;
    let wheels = download(&downloads, device)?;
    fs::create_dir_all(&fresh).with_context(|| format!("make {}", fresh.display()))?;
    unpack(&fresh, name, &wheels)?;
    fs::write(fresh.join("build-version"), format!("{VERSION}\n")).context("write the version")?;
    remove(&folder)?;
    fs::rename(&fresh, &folder).context("put .libtorch in place")?;
    remove(&downloads)?;
    eprintln!("libtorch {VERSION} is in .libtorch ({name})");
    Ok(())
}

/// Whether every file of the manifest is there in its size, for this version and device.
fn is_complete(folder: &Path, device: Device) -> bool {
    let Ok(manifest) = fs::read_to_string(folder.join("manifest")) else { return false };
    let version = fs::read_to_string(folder.join("build-version")).unwrap_or_default();
    let has_cuda = manifest.lines().any(|line| line.ends_with(" cuda/lib/libtorch_cuda.so"));
    version.trim() == VERSION
        && (device != Device::Cuda || has_cuda)
        && manifest.lines().all(|line| {
            let entry = line.split_once(' ').and_then(|(n, p)| Some((n.parse::<u64>().ok()?, p)));
            entry.is_some_and(|(size, path)| {
                fs::metadata(folder.join(path)).is_ok_and(|file| file.len() == size)
            })
        })
}

fn check_python() -> Result<()> {
    let found = Command::new("python3").arg("--version").output();
    ensure!(
        found.is_ok_and(|output| output.status.success()),
        "python3 was not found: install Python 3 with pip, {WAY_OUT}"
    );
    python(&["-m", "pip", "--version"])
        .with_context(|| format!("python3 has no pip: install it (python3-pip), {WAY_OUT}"))?;
    Ok(())
}

fn check_space(device: Device) -> Result<()> {
    let print = "import shutil, sys; print(shutil.disk_usage(sys.argv[1]).free)";
    let root = workspace::root().to_str().context("the workspace's path is not UTF-8")?;
    let free: u64 = python(&["-c", print, root])?.trim().parse().context("read the free space")?;
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
    let complete = downloads.join(if device == Device::Cuda { "cuda" } else { "cpu" });
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
    command.args(libtorch::CPU_WHEELS).stdout(Stdio::inherit()).stderr(Stdio::piped());
    let output = command.spawn().and_then(std::process::Child::wait_with_output);
    let output = output.context("cannot start python3 -m pip")?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    bail!(
        "pip could not download torch {VERSION}: {}: check the network and pip's configuration and \
         run again, {WAY_OUT}",
        last.trim().trim_start_matches("ERROR: ")
    )
}

fn unpack(to: &Path, device: &str, wheels: &[PathBuf]) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-c", include_str!("unpack.py")]).arg(to).arg(device).args(wheels);
    process::run(command.stdin(Stdio::null())).map_err(|_| {
        anyhow::anyhow!(
            "the wheels could not be unpacked (see above): remove .libtorch-download and run again"
        )
    })
}

fn python(args: &[&str]) -> Result<String> {
    let output = Command::new("python3").args(args).output().context("python3 was not found")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", errors.lines().last().unwrap_or("python3 failed"));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn remove(folder: &Path) -> Result<()> {
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

    fn parse(args: &[&str], driver: bool) -> Result<Device> {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        parse_device(&args, driver)
    }

    #[test]
    fn devices_are_read_in_both_spellings() {
        assert_eq!(parse(&[], true).unwrap(), Device::Cpu);
        assert_eq!(parse(&["--device", "rocm"], false).unwrap(), Device::Rocm);
        assert_eq!(parse(&["--device=auto"], true).unwrap(), Device::Cuda);
        assert_eq!(parse(&["--device=auto"], false).unwrap(), Device::Cpu);
        assert!(parse(&["--device", "tpu"], false).unwrap_err().to_string().contains("`tpu`"));
        assert!(parse(&["cpu"], false).is_err());
    }

    #[test]
    fn another_release_is_refused_by_name() {
        assert!(check_version("2.11.0+cu130", "it").is_ok());
        let error = check_version("2.10.0", "the PyTorch of python3").unwrap_err().to_string();
        assert!(error.contains("2.10.0") && error.contains("needs 2.11.0"), "{error}");
    }
}
