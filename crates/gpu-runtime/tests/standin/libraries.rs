//! Builds the stand-in libraries and gives each test copies with counters of their own.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use gpu_runtime::{Api, DeviceChoice, Gpu, GpuOptions, Libraries};
use libloading::Library;
use tempfile::TempDir;

/// Stand-in libraries of one vendor in a folder of their own.
pub(crate) struct Standin {
    folder: TempDir,
    library: Library,
    choice: DeviceChoice,
}

impl Standin {
    pub(crate) fn new(api: Api) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let (names, choice) = match api {
            Api::Cuda => {
                (["libcuda.so.1", "libnvrtc.so.13", "libcublas.so.13"], DeviceChoice::Cuda(0))
            }
            Api::Rocm => {
                (["libamdhip64.so.6", "libhiprtc.so.6", "libhipblas.so.2"], DeviceChoice::Rocm(0))
            }
        };
        let [driver, compiler, blas] = names.map(|name| folder.path().join(name));
        fs::copy(built(api), &driver).unwrap();
        // The loader takes one file under several names for one library: one set of counters.
        fs::hard_link(&driver, compiler).unwrap();
        fs::hard_link(&driver, blas).unwrap();
        // SAFETY: the stand-in runs nothing when it is loaded.
        let library = unsafe { Library::new(&driver) }.unwrap();
        Self { folder, library, choice }
    }

    /// Without the library whose name contains `name`.
    pub(crate) fn without(self, name: &str) -> Self {
        for entry in fs::read_dir(self.folder.path()).unwrap() {
            let path = entry.unwrap().path();
            if path.to_string_lossy().contains(name) {
                fs::remove_file(path).unwrap();
            }
        }
        self
    }

    /// With as much memory as a BLAS workspace needs.
    pub(crate) fn with_room_for_blas(self) -> Self {
        // SAFETY: the type is that of the stand-in.
        unsafe {
            self.library.get::<unsafe extern "C" fn(usize)>(b"standin_room").unwrap()(64 << 20);
        }
        self
    }

    pub(crate) fn options(&self) -> GpuOptions {
        GpuOptions {
            libraries: Libraries::only([self.folder.path().to_owned()]),
            kernel_cache: Some(self.cache()),
        }
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    pub(crate) fn open(&self) -> Gpu {
        Gpu::open_with(&self.choice, self.options()).unwrap().unwrap()
    }

    /// The next call of the function fails with the code.
    pub(crate) fn fail(&self, name: &str, code: c_int) {
        let name = CString::new(name).unwrap();
        // SAFETY: the type is that of the stand-in.
        unsafe {
            let fail =
                self.library.get::<unsafe extern "C" fn(*const c_char, c_int)>(b"standin_fail");
            fail.unwrap()(name.as_ptr(), code);
        }
    }

    pub(crate) fn set_devices(&self, n: c_int) {
        // SAFETY: the type is that of the stand-in.
        unsafe {
            self.library.get::<unsafe extern "C" fn(c_int)>(b"standin_devices").unwrap()(n);
        }
    }

    /// Contexts, blocks, streams and the like that were made and not destroyed.
    pub(crate) fn live(&self) -> c_int {
        // SAFETY: the type is that of the stand-in.
        unsafe { self.library.get::<unsafe extern "C" fn() -> c_int>(b"standin_live").unwrap()() }
    }

    /// How often a function was called.
    pub(crate) fn calls(&self, name: &str) -> usize {
        // SAFETY: the type is that of the stand-in, whose text is a C string.
        let log = unsafe {
            let log = self.library.get::<unsafe extern "C" fn() -> *const c_char>(b"standin_log");
            CStr::from_ptr(log.unwrap()())
        };
        log.to_string_lossy().split_whitespace().filter(|call| *call == name).count()
    }
}

/// The library of a vendor, built once for all tests.
fn built(api: Api) -> &'static Path {
    static BUILT: [OnceLock<PathBuf>; 2] = [const { OnceLock::new() }; 2];
    BUILT[api as usize].get_or_init(|| {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/standin/standin.c");
        let file = format!("standin-{api}-{}.so", std::process::id());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-O1", "-Wall", "-shared", "-fPIC", source, "-o"]).arg(&file);
        if api == Api::Rocm {
            cc.arg("-DROCM");
        }
        let output = cc.output().expect("a C compiler, which linking needs as well");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        file
    })
}
